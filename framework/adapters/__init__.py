"""The only places that touch private names of torch and Lightning; `tests/contract/test_private_apis.py` watches each."""

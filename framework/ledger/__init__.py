"""The ledger: which samples each optimizer step was trained on, written by the ranks that trained them.

`numbering` lets the numbers of samples travel with a batch through workers and collation; `chain` makes of them one
hash that all ranks know and that no mix changes; `writer` keeps both in the run's folder; `history` puts the records of
restarts and resizes together again and proves that nothing was seen twice or left out (`python -m framework ledger`).
"""

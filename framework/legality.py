"""All complaints about a mix of options, and the nearest mixes that have none.

A mix is slot -> option. What options need, give and exclude is data (`Requirements`), words that any of them may use;
everything else that can be said before a process starts comes from `check_plan` and `check_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, product

import pluggy

from framework.catalog import NONE
from framework.errors import Problem
from framework.plan import Requirements
from framework.plugin_manager import ask_each
from framework.schema import DEFAULT_SLOTS

Mix = Mapping[str, str]
"""Slot -> option, of what is on."""

SHOWN = 3
"""Mixes that are suggested at most."""

TRIES = 400
"""Mixes that are looked at before the search gives up."""


def requirements_of(manager: pluggy.PluginManager) -> dict[str, Requirements]:
    """Ask every chosen option: slot -> what it needs, gives and excludes."""
    found: dict[str, Requirements] = ask_each(manager, "requirements")
    return found


def words_given(mix: Mix, requirements: Mapping[str, Requirements]) -> dict[str, str]:
    """Return each word that the mix gives, and the slot that gives it."""
    given: dict[str, str] = {}
    for slot, option in mix.items():
        given[slot] = given[f"{slot}={option}"] = slot
    for slot, need in requirements.items():
        given |= dict.fromkeys(need.gives, slot)
    return given


def conflicts(mix: Mix, requirements: Mapping[str, Requirements]) -> Iterator[Problem]:
    """Yield a complaint for each word that is needed and not given, or given and excluded."""
    given = words_given(mix, requirements)
    for slot, need in requirements.items():
        asked = f"{slot}={mix[slot]}"
        for word in sorted(need.needs - given.keys()):
            reason = _because(f"it needs {_spoken(word)}, which nothing chosen gives", need, word)
            yield Problem(asked, reason, word if "=" in word else "")
        for word in sorted(need.excludes & given.keys()):
            other = given[word]
            with_ = f"{other}={mix[other]}" if other in mix else other
            yield Problem(asked, _because(f"it can't be combined with {with_}", need, word))


def _because(text: str, need: Requirements, word: str) -> str:
    why = need.why.get(word)
    return f"{text}: {why}" if why else text


def _spoken(word: str) -> str:
    return word if "=" in word else word.replace("_", " ")


def plan_complaints(manager: pluggy.PluginManager, hook: str, **arguments: object) -> dict[str, list[Problem]]:
    """Ask all chosen options for complaints: slot -> what it says. `hook` is `check_plan` or `check_model`."""
    return {slot: list(said) for slot, said in ask_each(manager, hook, **arguments).items() if said}


def nearest(
    mix: Mix,
    suspects: Iterable[str],
    options: Mapping[str, Sequence[str]],
    legal: Callable[[Mix], bool],
) -> list[str]:
    """Return up to three mixes that work and change as few concerns as possible, as words to type.

    Args:
        mix: what was asked.
        suspects: slots that the complaints are about, and those whose words they need: only these are changed.
        options: slot -> the options it has, `none` not among them.
        legal: whether a mix has no complaint; called for at most `TRIES` mixes.
    """
    slots = sorted(set(suspects) & options.keys())
    tried = 0
    for changes in range(1, min(len(slots), 3) + 1):
        found: list[Mix] = []
        for candidate in _candidates(mix, slots, options, changes):
            tried += 1
            if tried > TRIES:
                return [words(mix, found_mix) for found_mix in found]
            if legal(candidate):
                found.append(candidate)
                if len(found) == SHOWN:
                    break
        if found:
            return [words(mix, found_mix) for found_mix in found]
    return []


def _candidates(mix: Mix, slots: Sequence[str], options: Mapping[str, Sequence[str]], changes: int) -> Iterator[Mix]:
    """Yield mixes with exactly so many changes: another option first, fewer concerns switched off first."""
    ways: list[tuple[int, Mix]] = []
    for changed in combinations(slots, changes):
        choices = []
        for slot in changed:
            others: list[str | None] = [option for option in options[slot] if option != mix.get(slot)]
            if slot in mix and slot not in DEFAULT_SLOTS:
                others.append(None)
            choices.append(others)
        for values in product(*choices):
            candidate: dict[str, str] = dict(mix)
            for slot, value in zip(changed, values, strict=True):
                if value is None:
                    del candidate[slot]
                else:
                    candidate[slot] = value  # in its place
            cost = sum(value is None for value in values)
            # A concern that nobody asked for is the last thing to suggest.
            cost += 2 * sum(slot not in mix for slot in changed)
            ways.append((cost, candidate))
    for _, way in sorted(ways, key=lambda way: way[0]):
        yield way


def words(asked: Mix, mix: Mix) -> str:
    """Return what to type for `mix`: every concern that is optional and on, and every one that changed."""
    typed = [
        f"{slot}={option}" for slot, option in mix.items() if slot not in DEFAULT_SLOTS or asked.get(slot) != option
    ]
    typed += [f"{slot}={NONE}" for slot in asked if slot not in mix]
    return " ".join(typed)

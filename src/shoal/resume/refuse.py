"""What a study that goes on must not change: each refusal, with what to do instead."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

from shoal.core.errors import SpecError
from shoal.core.spec import Scalar
from shoal.core.units import counted, named_trials
from shoal.resume.code import is_same
from shoal.resume.recipe import PERMISSIONS, RecipeRecord
from shoal.resume.record import StudyRecord, TrialRecord
from shoal.search.parameters import CODE, first_difference, is_seeded_otherwise
from shoal.source import lasting_name

MAX_DIFF_LINES = 40
_OTHERWISE = "or give the study another name; overwrite=True (--overwrite) trains all anew."


def another_study(recorded: StudyRecord, asked: StudyRecord) -> None:
    """The directory is of a study of another name."""
    if recorded.name != asked.name:
        raise SpecError(
            f"cannot go on with study {asked.name!r}: the directory holds study "
            f"{recorded.name!r}. Choose the directory of {asked.name!r}, or another one."
        )


def another_unit(recorded: StudyRecord, asked: StudyRecord) -> None:
    """Epochs became steps, or steps epochs."""
    if recorded.unit != asked.unit:
        raise SpecError(
            f"cannot go on with study {asked.name!r}: it trains for {recorded.unit}="
            f"{recorded.length}, and {asked.unit}={asked.length} is asked for now. Give the "
            f"length in {recorded.unit}, {_OTHERWISE}"
        )


_PLAIN = {"grid or random", "grid", "random"}
_COMPARED_APART = (" parameters", "points")


def another_search(recorded: StudyRecord, asked: StudyRecord, *, accepts_sampler: bool) -> None:
    """Trials were chosen or ended by results, and that would go on by other rules.

    ``accepts_sampler``: the same one may have been made with other values.
    """
    if not (recorded.search or asked.search):
        return
    was, now = _rules(recorded), _rules(asked)
    others = [name for name in now if was.get(name) != now[name]]
    if {was["sampler"], now["sampler"]} <= _PLAIN and "pruner" in others:
        others = [n for n in others if n != "sampler"]  # only named differently beside a pruner
    for what in ("sampler", "pruner"):
        if what not in others and not (what == "sampler" and accepts_sampler):
            _another_parameter(recorded, asked, what)
    if recorded.is_adaptive and asked.is_adaptive and not others:
        _other_points(recorded, asked)
    if others:
        name = others[0]
        raise SpecError(
            f"cannot go on with study {asked.name!r}: its search had {name}={was.get(name)}, and "
            f"{name}={now[name]} is asked for now. Which trials there are, and which ended early, "
            f"follows from that. Put {name}={was.get(name)} back, {_OTHERWISE}"
        )


def _another_parameter(recorded: StudyRecord, asked: StudyRecord, what: str) -> None:
    """A sampler or pruner of the same name was made with other values."""
    texts = [record.search.get(f"{what} parameters", "") for record in (recorded, asked)]
    if (found := first_difference(*texts)) is None:
        return
    if is_seeded_otherwise(*texts):
        raise SpecError(
            f"cannot go on with study {asked.name!r}: its {what}, {asked.search[what]}, had "
            "another seed, or none, and then it is another one each time it is made. "
            f"Which trials there are follows from that. Put the seed back, {_OTHERWISE}"
        )
    name, was, now = found
    accepted = "or accept it for the trials to come (accept_recipe=True, --accept-recipe), "
    changed, back = f"{name}={was}, and {name}={now} is asked for now", f"{name}={was}"
    if CODE in name:
        code = name[name.index(CODE) :]
        changed, back = f"other code: {code} has changed", code
    raise SpecError(
        f"cannot go on with study {asked.name!r}: its {what}, {asked.search[what]}, had "
        f"{changed}. Which trials there are, and which ended early, follows from that. Put "
        f"{back} back, {accepted if what == 'sampler' else ''}{_OTHERWISE}"
    )


def _other_points(recorded: StudyRecord, asked: StudyRecord) -> None:
    """A sampler learnt of other points that were tried first."""
    was, now = (json.loads(record.search.get("points", "[]")) for record in (recorded, asked))
    pairs = enumerate(zip_longest(was, now))
    found = next(((i, *pair) for i, pair in pairs if repr(pair[0]) != repr(pair[1])), None)
    if found is not None:
        index, before, after = found
        raise SpecError(
            f"cannot go on with study {asked.name!r}: its points[{index}] "
            f"{'was not there' if before is None else f'was {before!r}'}, and "
            f"{'is not there' if after is None else f'{after!r} is asked for'} now. Its sampler "
            f"learnt of the points that were tried first. Put them back, {_OTHERWISE}"
        )


def other_sampler(recorded: StudyRecord, asked: StudyRecord) -> tuple[str, str, str] | None:
    """The first parameter that the sampler of a search was made with otherwise; and how."""
    texts = (record.search.get("sampler parameters", "") for record in (recorded, asked))
    return first_difference(*texts)


def another_space(recorded: StudyRecord, asked: StudyRecord) -> None:
    """A sampler drew from another space than is asked for now."""
    if recorded.space != asked.space:
        raise SpecError(
            f"cannot go on with study {asked.name!r}: its sampler drew from the space "
            f"{recorded.space}, and the space is {asked.space} now. Put the space back, "
            f"{_OTHERWISE}"
        )


def fewer_trials(recorded: StudyRecord, wanted: int) -> None:
    """A search was to come to more trials than it is now."""
    if wanted < recorded.sampled:
        raise SpecError(
            f"cannot go on with study {recorded.name!r} for trials={wanted}: its search came to "
            f"{recorded.sampled} already. Ask for at least trials={recorded.sampled}, {_OTHERWISE}"
        )


def another_seed(recorded: StudyRecord, asked: StudyRecord) -> None:
    """The study's seed is another one, and trials' seeds came from it."""
    derived = [trial.number for trial in recorded.trials if "seed" not in trial.hp]
    if recorded.seed != asked.seed and derived:
        raise SpecError(
            f"cannot go on with study {asked.name!r} with seed={asked.seed}: it has "
            f"seed={recorded.seed}, and the seeds of {counted(len(derived), 'trial')} came from "
            f"it. Put seed={recorded.seed} back, {_OTHERWISE}"
        )


def another_evaluation(recorded: StudyRecord, asked: StudyRecord) -> None:
    """Evaluated at other steps, where the schedule goes by what evaluations find."""
    goes_by_them = recorded.recipe.fields.get("schedule_interval") == "'evaluation'"
    if goes_by_them and recorded.eval_every != asked.eval_every:
        raise SpecError(
            f"cannot go on with study {asked.name!r} with eval_every={asked.eval_every}: it has "
            f"eval_every={recorded.eval_every}, and its schedule is stepped at evaluations "
            f"(schedule_interval='evaluation'), so that it would be another training. Put "
            f"eval_every={recorded.eval_every} back, {_OTHERWISE}"
        )


def missing_trials(
    recorded: StudyRecord, asked: StudyRecord, missing: Sequence[TrialRecord]
) -> None:
    """Fewer trials, or a space that has lost some of them; those added by hand stay."""
    lost = [trial for trial in missing if trial.origin == "asked"]
    if not lost:
        return
    shown = "; ".join(f"trial {t.number} ({_settings(t.hp)})" for t in lost[:3])
    more = f"; and {len(lost) - 3} more" if len(lost) > 3 else ""
    trials = counted(len(recorded.trials), "trial")
    raise SpecError(
        f"cannot go on with study {asked.name!r}: {len(lost)} of its {trials} "
        f"{'is' if len(lost) == 1 else 'are'} not asked for any more: "
        f"{shown}{more}.{_renamed(lost[0].hp, asked)} Ask for "
        "all of them again (more trials and a wider space are welcome, and more points= with as "
        "many more trials=; shoal stop STUDY TRIAL ends a trial that is not wanted), "
        f"{_OTHERWISE}"
    )


def less_training(asked: StudyRecord, done: Mapping[int, int]) -> None:
    """Fewer epochs or steps than some trial did already."""
    beyond = sorted(number for number, length in done.items() if length > asked.length)
    if beyond:
        most = max(done[number] for number in beyond)
        raise SpecError(
            f"cannot go on with study {asked.name!r} for {asked.unit}={asked.length}: "
            f"{named_trials(beyond)} trained longer, up to {most} {asked.unit}. Ask for at least "
            f"{asked.unit}={most}, {_OTHERWISE}"
        )


def weights_only(recorded: StudyRecord, asked: StudyRecord, trials: Sequence[int]) -> None:
    """More training for finished trials of which only the weights were kept."""
    if trials:
        raise SpecError(
            f"cannot train {named_trials(trials)} of study {asked.name!r} on to {asked.unit}="
            f"{asked.length}: of a finished trial only the weights were kept, and training needs "
            "its optimizer's state and random numbers too. Put "
            f"{asked.unit}={recorded.length} back, or run a study of another name with "
            f"keep_finished='all' and {asked.unit}={asked.length}."
        )


def another_recipe(recorded: StudyRecord, asked: StudyRecord, trained: Sequence[int]) -> None:
    """The recipe is not the one that trials were trained with."""
    names, lines = differences(recorded.recipe, asked.recipe)
    shown = lines[:MAX_DIFF_LINES]
    if len(lines) > MAX_DIFF_LINES:
        shown.append(f"... and {len(lines) - MAX_DIFF_LINES} more lines")
    diff = "\n".join(f"  {line}" for line in shown)
    raise SpecError(
        f"cannot go on with study {asked.name!r}: {named_trials(trained)} trained with another "
        f"recipe, and trials of two recipes cannot be compared. Changed: {', '.join(names)}.\n"
        f"{diff}\n"
        "Put the recipe back; or accept it as it is now with accept_recipe=True "
        "(--accept-recipe): trials that have not ended, and failed ones with retry_failed=True "
        "(--retry-failed), go on with it from their last state, and that is recorded; "
        f"{_OTHERWISE}"
    )


# -- in words ---------------------------------------------------------------------------------


def _rules(record: StudyRecord) -> dict[str, object]:
    """What the trials of a search follow from, beside their values."""
    none = {"sampler": "grid or random", "pruner": "none", "generation": "none"}
    search = {n: lasting_name(v) for n, v in (record.search or none).items()}
    return {
        **{n: v for n, v in search.items() if not n.endswith(_COMPARED_APART)},
        record.unit: record.length,
        "eval_every": record.eval_every,
        "metric": record.metric,
        "mode": record.mode,
        "seed": record.seed,
    }


def _settings(hp: Mapping[str, Scalar]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in hp.items())


def _renamed(hp: Mapping[str, Scalar], asked: StudyRecord) -> str:
    """A hint where the names differ: no trial of the one space is in the other then."""
    names = {name for trial in asked.trials for name in trial.hp} if asked.trials else set(hp)
    gone, came = sorted(set(hp) - names), sorted(names - set(hp))
    parts = [f"no longer has {', '.join(gone)}"] if gone else []
    parts += [f"now has {', '.join(came)}"] if came else []
    return f" The space {' and '.join(parts)}." if parts else ""


def differences(old: RecipeRecord, now: RecipeRecord) -> tuple[list[str], list[str]]:
    """The names of what changed, and a unified diff of it."""
    names = list(_changed(old.sources, now.sources))
    lines: list[str] = []
    for name in names:
        lines += _diff(old.sources.get(name, ""), now.sources.get(name, ""))
    for name in _changed(old.fields, now.fields):
        if name in PERMISSIONS:
            continue
        before, after = (record.fields.get(name, "(default)") for record in (old, now))
        lines += [f"-{name}={before}", f"+{name}={after}"]
        names.append(f"Recipe({name}=...)")
    return names, lines


def _changed(old: Mapping[str, str], now: Mapping[str, str]) -> Iterable[str]:
    for name in [*old, *(name for name in now if name not in old)]:
        if name not in old or name not in now or not is_same(old[name], now[name]):
            yield name


def _diff(old: str, now: str) -> list[str]:
    lines = difflib.unified_diff(old.splitlines(), now.splitlines(), n=2, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++"))]

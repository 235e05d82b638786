"""One trial over several devices: what is measured until its stages are settled, and why.

``early`` says what can be seen to be impossible before anything is measured. That two stages
would change one buffer, or that a forward writes to a parameter, the measure tells; what no first
batch shows (other rows in a later batch, say) is the running trial's to refuse.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from shoal.core.errors import PlanError
from shoal.core.spec import DeviceSpec, JobMeasure, Scalar, TrialSpec
from shoal.core.technique import SPILLING, Pipelined, Resident, Schedule, Technique
from shoal.core.units import Bytes, counted, format_bytes, format_seconds
from shoal.kernels import rounding
from shoal.memory.layout import with_previous
from shoal.pipeline.stops import MOST_S, Stops
from shoal.planner.choose import about_s
from shoal.planner.need import Need, Request, need
from shoal.planner.pipeline import (
    Alternative,
    Staged,
    candidates,
    is_worth,
    resident_s,
    staged,
)
from shoal.planner.price import Speeds
from shoal.planner.stages import legal_cuts, most_pieces
from shoal.planner.steptime import Terms
from shoal.planner.timetoloss import Place
from shoal.planning.planned import Settled
from shoal.planning.speeds import corrected
from shoal.planning.spillingstages import (
    best_on_paper,
    head,
    how_long,
    may_spill,
    reads_beside,
    settle_spilled,
    too_many_shards,
    why_spilled,
)
from shoal.planning.weighing import TIED, Finder, Found, Weighed, Weighing, guesses_ties
from shoal.planning.widening import (
    instead,
    least_micros,
    refuse_copies,
    too_few_micros,
    ways_out,
    who_needs,
    why_wide,
)
from shoal.recipes.recipe import Recipe
from shoal.recipes.schedules import by_evaluations
from shoal.runtime.wire.messages import Measure, Measured, MeasureShards, Order

Question = Generator[Order, Measured, Settled]
"""Orders to measure, one after the other; it is sent the answer to each, and returns the end."""

MARGINS = (1.0, 0.9, 0.8)
"""What should fit is tried, and if it did not what should leave so much of the budget."""
MOST_MEASURED = 8
NEARBY = 3
HALVING: Schedule = "zb-h1"
"""The schedule whose backwards are cut in two: what their halves take is measured for it alone."""


def early(technique: Technique | None, recipe: Recipe, devices: Sequence[DeviceSpec]) -> None:
    """Refuse a pipeline that is impossible whatever its model is.

    Raises:
        PlanError: says what was asked, what there is, and the way out.
    """
    if not isinstance(technique, Pipelined):
        return
    stages, names = technique.stages or 2, ", ".join(device.name for device in devices)
    if stages * technique.width > len(devices):
        wide = technique.width > 1
        copies = f"{technique.width} copies of " if wide else ""
        count = f", which is {stages * technique.width}," if wide else ","
        raise PlanError(
            f"{copies}a pipeline of {stages} stages takes a device for each{count} and there "
            f"{'is' if len(devices) == 1 else 'are'} {len(devices)}: {names}. Ask for fewer "
            f"{'copies or ' * wide}stages, or give more devices."
        )
    if recipe.precision == rounding.NAME:
        raise PlanError(
            f"precision={rounding.NAME!r} cannot be pipelined: its steps round weights by chance, "
            "which no test holds to the plain loop over stages yet. Use 'bf16' or 'fp32'."
        )
    if words := by_evaluations(recipe):
        raise PlanError(words)
    _refuse_micro_batches(technique, recipe)


def _refuse_micro_batches(technique: Pipelined, recipe: Recipe) -> None:
    accumulate = recipe.accumulate
    micros = technique.micro_batches or accumulate
    if micros % accumulate:
        near = max(1, micros // accumulate) * accumulate
        raise PlanError(
            f"micro_batches={micros} is no multiple of the {accumulate} batches of a step "
            f"(accumulate={accumulate}): each batch is cut into as many pieces. Ask for {near} or "
            f"{near + accumulate}."
        )
    if micros > accumulate and not recipe.splittable:
        raise PlanError(
            f"micro_batches={micros} cuts each of the {accumulate} batches of a step into "
            f"{micros // accumulate}, and the recipe does not say that they may be: a split is "
            "another experiment for BatchNorm, ignored labels and losses over a batch. Give "
            f"Recipe(splittable=True), or ask for micro_batches={accumulate}."
        )
    if words := too_few_micros(technique, micros, f"and a step has {micros}"):
        least = least_micros(technique)
        raise PlanError(
            f"{words} (accumulate={accumulate}). Give Recipe(accumulate={least}), "
            f"{ways_out(technique)}."
        )


def numerics(technique: Technique, accumulate: int) -> dict[str, Scalar]:
    """What of a pipeline changes a trial's bits: nothing, unless weights are stale or cut rows.

    How many stages there are changes none in any schedule: 2bw's weights are one step old at
    every stage.
    """
    found: dict[str, Scalar] = {}
    if not isinstance(technique, Pipelined):
        return found
    if technique.width > 1:
        found["copies"] = technique.width
    if technique.is_stale:
        found["weights"] = "one step old" + (", guessed" if technique.predict else "")
    if technique.micro_batches != accumulate:
        found["micro_batches"] = technique.micro_batches
    return found


def technique_on_record(keys: Iterable[Mapping[str, Scalar]]) -> Technique | None:
    """The technique that trials with such numerics keys go on with; None for any other one."""
    for key in keys:
        weights, micros = key.get("weights"), key.get("micro_batches")
        copies = key.get("copies")
        if weights or micros or copies:
            return Pipelined(
                schedule="2bw" if weights else None,
                predict="guessed" in str(weights),
                micro_batches=int(micros) if micros else None,
                width=int(copies or 1),
            )
    return None


FEW = 24
"""Layers up to which spilled stages are looked for also where nobody would take them: to say what
they would take. Of twice as many that is seconds of planning."""


class Pipelining:
    """Decides on pipelines, for devices of the smallest one's size.

    Args:
        steps: Of a trial; None where it ends after epochs.
        stops: Where trials stop; None: that is not priced.
        idle: Devices beside these, which no trial has: only then a pipeline is chosen that
            nobody asked for.
    """

    def __init__(
        self,
        devices: Sequence[DeviceSpec],
        recipe: Recipe,
        request: Request,
        *,
        steps: int | None = None,
        stops: Stops | None,
        idle: Sequence[DeviceSpec] = (),
    ) -> None:
        self._stops = stops
        self._devices, self._recipe, self._request = len(devices) + len(idle), recipe, request
        self._budget = Bytes(min(device.for_trials for device in (*devices, *idle)))
        self._steps, self._may_choose = steps, bool(idle)

    def settle(self, trial: TrialSpec, asked: Pipelined, trials: int, speeds: Speeds) -> Question:
        """Order measures until the stages of one trial are settled, of ``trials`` that wait.

        Raises:
            PlanError: it cannot be cut so, or fits in no such way; names the stage.
        """
        is_open, asked = asked.schedule is None, replace(asked, schedule=asked.known_schedule)
        measured = yield Measure(trial, cut=True, halves=is_open or asked.schedule == HALVING)
        self._refuse(trial, measured.measure, asked)
        speeds = corrected(speeds, measured.measure.link)
        terms = self._terms(measured.measure, speeds)
        found = yield from self._whole_or_spilled(trial, asked, terms, trials)
        if isinstance(found, PlanError):
            raise found
        weighed: Weighed = None, ()
        if is_open:
            weighed = yield from self._weigh(trial, asked, terms, trials, found)
        exact, chosen = weighed[0] or found
        if guesses_ties(asked, exact):
            raise PlanError(head(trial, chosen.technique) + f"{TIED}. Leave predict=True out.")
        whole = self._resident(measured)
        other = self._alone(measured.measure, whole, speeds)
        why = [*self._why_so(whole, exact, chosen, asked, terms), *weighed[1], *_against(other)]
        return self._settled(exact, chosen, why)

    def _whole_or_spilled(
        self, trial: TrialSpec, asked: Pipelined, terms: Terms, trials: int
    ) -> Generator[Order, Measured, tuple[Measured, Staged] | PlanError]:
        """Stages that stay whole where some fit, or else spilled ones."""
        whole: PlanError | None = None
        if not asked.is_spilled:
            found = yield from self._exact(trial, asked, terms, trials)
            if not isinstance(found, PlanError) or not may_spill(asked):
                return found
            whole = found
        args = (terms, self._budget, self._devices, trials)
        spilled = yield from settle_spilled(trial, asked, *args)
        if isinstance(spilled, PlanError) and whole is not None:
            return PlanError(f"{whole} {spilled}")
        return spilled

    def _why_so(
        self, whole: Need, exact: Measured, chosen: Staged, asked: Pipelined, terms: Terms
    ) -> list[str]:
        if chosen.technique.is_spilled:
            return why_spilled(whole, chosen, asked, terms, exact, self._budget)
        return self._why(whole, chosen, asked, terms)

    def instead(
        self,
        trial: TrialSpec,
        measured: Measured,
        settled: Settled,
        other: Alternative,
        trials: int,
        speeds: Speeds,
    ) -> Question:
        """What is ``settled`` for one device, or a pipeline where that is clearly quicker.

        Only over devices that would idle, and to the same bits. Says what the other takes.
        """
        measure, devices = measured.measure, self._devices
        asked = Pipelined(micro_batches=self._request.micro_batches)
        if devices < 2 or self._impossible(measure, asked):
            return settled
        terms = self._terms(measure, speeds)
        same_bits = measure.bitwise and self._request.place != "host"
        # Where both data and model draw, batches must not be read ahead of their turn.
        same_bits &= measure.num_batches is not None or not measure.draws
        may = self._may_choose and trials < devices and same_bits
        best = next(self._fitting(asked, terms, trials, self._budget), None)
        if best is None and (may or len(measure.layers) <= FEW):  # of stages that stay whole
            best = best_on_paper(asked, terms, self._budget, devices, trials)
        if best is None:
            return settled
        taken: Found | None = None
        if may and is_worth(best, other, devices, trials):
            found = yield from self._whole_or_spilled(trial, asked, terms, trials)
            if not isinstance(found, PlanError) and is_worth(found[1], other, devices, trials):
                taken = found
        weighed: Weighed = None, ()
        if may:
            weighed = yield from self._weigh(trial, asked, terms, trials, taken or other)
        taken, said = weighed[0] or taken, weighed[1]
        if taken is not None:
            why = self._why_so(self._resident(measured), *taken, asked, terms)
            return self._settled(*taken, [*why, *said, *_against(other)])
        spilled = "spilled " if best.technique.is_spilled else ""
        words = (
            f"as a pipeline of {best.gang} {spilled}stages a step would take about "
            f"{format_seconds(best.step_s)} on {best.gang} devices; {other.name} it takes "
            f"{format_seconds(other.step_s)} on one"
        )
        return replace(settled, why=(*settled.why, words, *said))

    def _weigh(
        self,
        trial: TrialSpec,
        asked: Pipelined,
        terms: Terms,
        trials: int,
        first: Found | Alternative,
    ) -> Generator[Order, Measured, Weighed]:
        """What is sooner at the loss than ``first``; stale weights if the recipe allows them."""
        weighing = Weighing(
            trial=trial,
            asked=asked,
            terms=terms,
            place=Place(budget=self._budget, devices=self._devices, trials=trials),
            stale=self._recipe.stale,
            finder=Finder(impossible=self._impossible, fitting=self._fitting, exact=self._exact),
        )
        return (yield from weighing.weigh(first))

    # -- looking for it -------------------------------------------------------------------

    def _terms(self, measure: JobMeasure, speeds: Speeds) -> Terms:
        casts = self._recipe.precision != "fp32"
        return Terms(
            measure=measure,
            request=self._request,
            speeds=speeds,
            casts=casts,
            shortest=self._shortest(measure),
            stops=self._stops,
        )

    def _shortest(self, measure: JobMeasure) -> int:
        """Batches of the shortest step that a trial comes to."""
        accumulate = self._request.micro_batches
        whole, rest = divmod(measure.num_batches or 0, accumulate)
        reached = self._steps is None or self._steps > whole
        return rest if rest and reached else accumulate

    def _fitting(
        self, asked: Pipelined, terms: Terms, trials: int, budget: Bytes
    ) -> Iterator[Staged]:
        all_ = candidates(asked, terms, budget, self._devices, trials)
        return (one for one in all_ if one.need.total <= budget)

    def _tries(self, asked: Pipelined, terms: Terms, trials: int) -> Iterator[Staged]:
        """Candidates to measure: the best that should fit, then what leaves more room."""
        for margin in MARGINS:
            yield from self._fitting(asked, terms, trials, Bytes(int(margin * self._budget)))
        most = (terms, self._budget, self._devices, trials)
        yield from candidates(asked, *most)
        if asked.recompute is None:
            yield from candidates(replace(asked, recompute=True), *most)

    def _exact(
        self, trial: TrialSpec, asked: Pipelined, terms: Terms, trials: int
    ) -> Generator[Order, Measured, tuple[Measured, Staged] | PlanError]:
        """The first candidate whose measured stages fit; or the words for that none does."""
        known: dict[tuple[int, ...], Measured] = {}
        tried: dict[Pipelined, Staged] = {}
        for one in self._tries(asked, terms, trials):
            technique = one.technique
            cuts = technique.cuts or ()
            if technique in tried or (cuts not in known and len(known) >= MOST_MEASURED):
                continue
            if cuts not in known:
                halves = technique.schedule == HALVING
                known[cuts] = yield MeasureShards(trial, cuts, halves=halves, apart=True)
            exact = known[cuts]
            if words := _shares_buffers(exact) or reads_beside(exact.measure, "stage"):
                return PlanError(head(trial, technique) + words)
            found = tried[technique] = staged(technique, exact.measure.shards, terms, exact.layout)
            if found.need.total <= self._budget:
                return exact, found
        return self._too_large(trial, asked, terms.measure, list(tried.values()))

    def _settled(self, exact: Measured, chosen: Staged, why: Sequence[str]) -> Settled:
        assert exact.layout is not None
        layout = exact.layout
        if chosen.technique.is_stale:
            layout = with_previous(layout, exact.measure.trained, guess=chosen.technique.predict)
        return Settled(
            measure=exact.measure,
            layout=layout,
            technique=chosen.technique,
            why=(*why, *exact.measure.notes, exact.measure.data),
            active=1,
            staged=chosen,
        )

    def _resident(self, measured: Measured) -> Need:
        measure = measured.measure
        return need(measure, measure.shards, Resident(), self._request, measured.layout)

    def _alone(self, measure: JobMeasure, whole: Need, speeds: Speeds) -> Alternative | None:
        """About what one device would take for a step; None where it cannot."""
        if whole.total <= self._budget:
            return Alternative(name="resident", step_s=resident_s(measure, self._request, speeds))
        request = replace(self._request, technique=None)
        step_s = about_s(measure, self._budget, request, speeds)
        return None if step_s is None else Alternative(name="spilled", step_s=step_s)

    # -- words ----------------------------------------------------------------------------

    def _why(self, whole: Need, chosen: Staged, asked: Pipelined, terms: Terms) -> list[str]:
        count, technique = len(chosen.stages), chosen.technique
        most, devices = self._devices // technique.width, count * technique.width
        each = ", ".join(
            f"stage {stage} needs {format_bytes(n.total)}" for stage, n in enumerate(chosen.needs)
        )
        named = f"{count} stages were asked for"
        if not asked.stages:
            named = f"{count} stages are the quickest that fit, of 2 to {most}"
            if most == 2:
                named = "there are devices for 2 stages"
        cut = "cut so that all fit and the slowest is as quick as can be"
        if asked.cuts:
            cut = "where they begin was asked for"
        reasons = [
            f"whole, on one device, it would need {format_bytes(whole.total)}, and one has "
            f"{format_bytes(self._budget)}; in stages {each}",
            f"{named}; {cut}",
            how_long(chosen.step_s, devices, chosen.bubbles, terms.speeds.sources),
        ]
        if asked.recompute is None:
            reasons.append(
                "forwards are run again before their backward, since what they save does not fit"
                if technique.recompute
                else "what forwards save is kept until their backward, for which there is room"
            )
        if asked.lag is None and technique.lag:
            reasons.append(
                f"stages run up to {counted(technique.lag, 'micro-batch', 'micro-batches')} "
                "further ahead than computing needs, so that nothing waits for messages"
            )
        if terms.measure.draws:
            otherwise = "waits for the others" if technique.width == 1 else "the trial fails"
            reasons.append(
                "the model draws random numbers: its first stage draws those of the others ahead, "
                f"in the order of training alone, and {otherwise} where it cannot"
            )
        if technique.width > 1:
            reasons.append(why_wide(technique, chosen.stages))
        if technique.schedule == "2bw":
            reasons.append(
                "with 2bw gradients are of weights that are one step old; both versions are part "
                "of the trial's state"
            )
        if chosen.stops:
            reasons.append(
                f"its steps overlap but at stops (evaluations, ends of epochs and leases, or "
                f"{MOST_S:g} s), one in {1 / chosen.stops:.3g} steps, where it runs empty: "
                f"{format_seconds(chosen.stops_s)} of a step"
            )
        return reasons

    def _too_large(
        self, trial: TrialSpec, asked: Pipelined, measure: JobMeasure, tried: Sequence[Staged]
    ) -> PlanError:
        """Which stage of what came closest does not fit, what it needs, and what would help."""
        closest = min(tried, key=lambda one: one.need.total)
        number, count = closest.neediest, len(closest.stages)
        stage = closest.stages[number]
        first, stop = stage.layers
        names = f"layers {first}..{stop - 1}"
        if measure.layers:
            names += f" ({measure.layers[first].name} to {measure.layers[stop - 1].name})"
        outs = ["give the devices more memory", "make the batch smaller"]
        if asked.cuts is not None:
            outs.append("leave cuts= out to have others tried")
        if asked.recompute is False:
            outs.append("leave recompute= out to have forwards run again")
        if asked.known_schedule in SPILLING and asked.cuts is not None and asked.width == 1:
            outs.append("have stages of several shards that come and go, with shards=")
        if asked.width > 1:
            others = Bytes(2 * (asked.width - 1) * stage.gradient_bytes)
            outs.append(f"ask for width=1, {format_bytes(others)} of other copies' gradients less")
        if (most := self._devices // asked.width) > count:
            outs.append(f"ask for more stages, up to {most}")
        return PlanError(
            f"{head(trial, closest.technique)}stage {number}, {names}, needs "
            f"{format_bytes(closest.needs[number].total)} on a device of "
            f"{format_bytes(self._budget)}: {format_bytes(stage.parameter_bytes)} of parameters, "
            f"{format_bytes(stage.state_bytes)} of optimizer state and "
            f"{format_bytes(stage.backward_peak_bytes)} inside a backward among that. Of "
            f"{len(tried)} that were measured none needs less. {'; '.join(outs).capitalize()}; or "
            "use technique='spilled'."
        )

    # -- refusals -------------------------------------------------------------------------

    def _refuse(self, trial: TrialSpec, measure: JobMeasure, asked: Pipelined) -> None:
        if words := self._impossible(measure, asked):
            raise PlanError(head(trial, asked) + words)

    def _impossible(self, measure: JobMeasure, asked: Pipelined) -> str:
        """Why a model that was measured cannot be a pipeline as asked; empty if it can."""
        if words := by_evaluations(self._recipe):
            return words
        if self._recipe.precision == rounding.NAME:
            return f"its weights are rounded by chance ({rounding.NAME}). Use 'bf16' or 'fp32'."
        if not measure.cuttable:
            notes = "; ".join(measure.notes).rstrip(".")
            return f"its model cannot be cut: {notes}. Use technique='resident'."
        if measure.written:
            return (
                f"a forward writes to the parameter {measure.written[0]!r}, as max_norm does, "
                "while other micro-batches of a pipeline are between their forward and backward. "
                "Train this model on one device."
            )
        if measure.draws_evaluating:
            return (
                "it, or a metric, draws random numbers while it is evaluated, which stages would "
                "draw in another order than one device. Use technique='spilled'."
            )
        return (
            _too_few_pieces(measure, asked)
            or _no_legal_cuts(measure, asked)
            or self._uneven_rows(measure, asked)
            or self._too_few_micros(measure, asked)
            or refuse_copies(measure, asked)
            or too_many_shards(measure, asked)
        )

    def _uneven_rows(self, measure: JobMeasure, asked: Pipelined) -> str:
        accumulate = self._request.micro_batches
        pieces = (asked.micro_batches or accumulate) // accumulate
        if measure.rows is None or not measure.rows % pieces:
            return ""
        return (
            f"micro_batches={asked.micro_batches} cuts each batch into {pieces} pieces of equal "
            f"rows, and the first one has {measure.rows}. Ask for micro_batches="
            f"{_near_micros(measure.rows, pieces, accumulate)}, or change the batch size."
        )

    def _too_few_micros(self, measure: JobMeasure, asked: Pipelined) -> str:
        """Whether a step has fewer micro-batches than it needs; the last of an epoch too."""
        if asked.schedule != "2bw" and asked.width == 1:
            return ""
        accumulate, count = self._request.micro_batches, measure.num_batches
        if count is None:
            return (
                "its data does not say how many batches it has, so the last step of an epoch may "
                f"have fewer micro-batches than {who_needs(asked)}. Give data with a len(), or "
                f"use {instead(asked)}."
            )
        shortest = self._shortest(measure)
        pieces = (asked.micro_batches or accumulate) // accumulate
        micros = shortest * pieces
        words = too_few_micros(asked, micros, f"and the last step of an epoch has {micros}")
        if not words:
            return ""
        return (
            f"{words}: {counted(count, 'batch is', 'batches are')} "
            f"{counted(count // accumulate, 'step')} of {accumulate} and {shortest} more. Drop "
            f"the last batches, change accumulate=, or use {instead(asked)}."
        )


def _near_micros(rows: int, pieces: int, accumulate: int) -> str:
    """The micro-batches of a step nearest to what was asked for that cut rows evenly."""
    even = [count for count in range(1, rows + 1) if not rows % count]
    near = {max(n for n in even if n < pieces), min((n for n in even if n > pieces), default=rows)}
    return " or ".join(str(count * accumulate) for count in sorted(near))


def _too_few_pieces(measure: JobMeasure, asked: Pipelined) -> str:
    most = most_pieces(measure.layers)
    if (asked.stages or 2) <= most:
        return ""
    return f"its model has {counted(most, 'piece')} that may stand alone. " + (
        f"Ask for at most {most}." if most > 1 else "Use technique='resident'."
    )


def _no_legal_cuts(measure: JobMeasure, asked: Pipelined) -> str:
    legal = legal_cuts(measure.layers)
    wrong = [cut for cut in asked.cuts or () if cut not in legal]
    if not wrong:
        return ""
    near = sorted(sorted(legal, key=lambda place: abs(place - wrong[0]))[:NEARBY])
    reason = measure.layers[wrong[0] - 1].reason if 0 < wrong[0] < len(measure.layers) else ""
    because = f" ({reason})" if reason else ""
    return (
        f"no stage may begin at layer {wrong[0]} of its {len(measure.layers)}{because}. Nearby "
        f"are {', '.join(map(str, near))}; or leave cuts= out to have them chosen."
    )


def _shares_buffers(exact: Measured) -> str:
    """Whether two stages would change one buffer: then a forward cannot wait for its backward."""
    alone = [s.index for s in exact.measure.shards[:-1] if s.saved_bytes is None]
    if not alone:
        return ""
    return (
        f"stage {alone[0]} and another one would change the same buffer, and each has a copy. "
        "Choose cuts= that keep its uses in one stage, or train this model on one device."
    )


def _against(other: Alternative | None) -> tuple[str, ...]:
    if other is None:
        return ("one device alone could not train it, not even spilled",)
    took = f"about {format_seconds(other.step_s)}"
    return (f"on one device, {other.name}, a step would take {took}",)

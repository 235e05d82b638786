"""The end of a step: every slot's gradients are clipped and its optimizer and schedule step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from shoal.fusion.crew import ArrayBackend, Crew
from shoal.fusion.declined import FROZEN, Declined
from shoal.fusion.likeness import Snapshot
from shoal.fusion.member import Member
from shoal.fusion.optim import FusedSteps
from shoal.fusion.passes.loop import LoopBackend, torch_streams_of
from shoal.kernels.kernelstep import is_torchs
from shoal.recipes.bound import clip_limit
from shoal.recipes.habits import kept_in_place, trained


class Finisher:
    """Steps the slots of one crew. What it does for a slot never depends on another one.

    ``names_held``: the parameters that the trials' optimizers have.
    """

    def __init__(self, crew: Crew, backend: ArrayBackend, names_held: Sequence[str]) -> None:
        self._crew, self._backend = crew, backend
        self._runs_copies = type(backend) is not LoopBackend
        self._fused = FusedSteps(backend.steps)
        self._names_held = names_held
        self._handed_out = True  # whether parameters may have gradients of their own
        self._codes: dict[int, tuple[nn.Module, Snapshot]] = {}  # of slots where others' code runs

    def drop_gradients(self, slots: Sequence[int]) -> None:
        """As ``zero_grad`` would: what no optimizer holds keeps its gradient."""
        for name in self._names_held:
            self._crew.stacked.parameters[name].grad = None
        for slot in slots if self._handed_out else ():
            for group in self._crew.members[slot].optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def finish(
        self, slots: Sequence[int], apart: Set[int], mixed: Set[int]
    ) -> dict[int, BaseException]:
        """Clip, step, advance; returns the errors of slots whose optimizer or schedule raised.

        ``apart``: slots whose gradients are, also or only, their parameters' own; ``mixed``
        are those of them that have some in the stacked ones too.
        """
        if not self._backend.stacks_gradients:
            apart, mixed = set(slots), set()
        together = [slot for slot in slots if slot not in apart]
        members = self._crew.members
        self._clip_together(together)
        gathered = [s for s in together if self._is_gathered(members[s])]
        by_themselves = sorted(set(slots) - set(gathered))
        self._backend.hand_out(
            self._crew, [s for s in by_themselves if s not in apart or s in mixed]
        )
        self._handed_out = len(gathered) < self._crew.width
        for slot in apart & set(slots):
            clip_alone(members[slot])
        theirs = [s for s in by_themselves if not members[s].habits.touches]
        stepped = self._fused.step(self._crew, gathered, theirs)
        return self._advance(slots, set(by_themselves) - stepped)

    def _is_gathered(self, member: Member) -> bool:
        """Whether it steps on rows of the stacked gradients, which its parameters do not have."""
        return not member.habits.touches and self._fused.takes(member.optimizer)

    def _advance(self, slots: Sequence[int], by_themselves: Set[int]) -> dict[int, BaseException]:
        failures: dict[int, BaseException] = {}
        for slot in slots:
            member = self._crew.members[slot]
            try:
                if slot in by_themselves and not is_torchs(member.optimizer):
                    self._step_theirs(slot)
                elif slot in by_themselves:
                    member.optimizer.step()
                if member.schedule and member.habits.touches:
                    with self._code_kept(slot):
                        self._advance_schedule(slot)
                else:
                    self._advance_schedule(slot)
                member.step += 1
            except (Exception, SystemExit) as error:
                failures[slot] = error
        return failures

    def _step_theirs(self, slot: int) -> None:
        """Step an optimizer of the user's, which may draw, and give parameters other data."""
        streams = torch_streams_of(self._crew, slot)
        held = _held(self._crew, slot, may_freeze=not self._runs_copies)
        with self._code_kept(slot), held, streams:
            self._crew.members[slot].optimizer.step()

    def _advance_schedule(self, slot: int) -> None:
        advance_schedule(self._crew, slot, may_freeze=not self._runs_copies)

    @contextmanager
    def _code_kept(self, slot: int) -> Iterator[None]:
        """Passes of an array run a copy of the model's code: nobody may make it another one.

        Raises:
            Declined: an attribute, a part, a hook or a mode of the model is another one.
        """
        if not self._runs_copies:
            yield
            return
        module = self._crew.members[slot].module
        known, code = self._codes.get(slot, (None, None))
        if known is not module or code is None or code.change():
            code = Snapshot(module)
            self._codes[slot] = module, code
        modes = [child.training for child in module.modules()]
        yield
        words = code.change()
        if not words and [child.training for child in module.modules()] != modes:
            words = "the mode of a part"
        if words:
            raise Declined(
                f"its schedule or its optimizer changed {words} of the model, which passes of an "
                "array have a copy of"
            )

    def _clip_together(self, slots: Sequence[int]) -> None:
        chosen = set(slots)
        limits = [
            clip_limit(member.recipe) if slot in chosen else None
            for slot, member in enumerate(self._crew.members)
        ]
        blocks = [b.grad for b in self._crew.stacked.parameters.values() if b.grad is not None]
        clip_stacked(blocks, limits)

    def let_go(self, member: Member, *, whole: bool = True) -> None:
        """The member's optimizer state stands on its own again, if it is wanted ``whole``."""
        self._fused.let_go(member.optimizer, whole=whole)


def advance_schedule(crew: Crew, slot: int, *, may_freeze: bool) -> None:
    """Step a slot's schedule, as it does alone.

    ``may_freeze``: each slot's passes are its own module's.

    Raises:
        Declined: it froze parameters, or unfroze some, and may not.
    """
    member = crew.members[slot]
    if not member.schedule:
        return
    with ExitStack() as inside:
        if member.habits.touches:
            inside.enter_context(_held(crew, slot, may_freeze=may_freeze))
        if member.habits.draws:
            inside.enter_context(torch_streams_of(crew, slot))
        member.schedule.step()


@contextmanager
def _held(crew: Crew, slot: int, *, may_freeze: bool) -> Iterator[None]:
    """Code of the user's may give parameters other data: their rows have it then.

    Raises:
        Declined: it froze parameters, or unfroze some, and may not.
    """
    module = crew.members[slot].module
    before = trained(module)
    with kept_in_place(dict(module.named_parameters())):
        yield
    crew.stacked.put_buffers(slot, module)
    if not may_freeze and trained(module) != before:
        raise Declined(FROZEN)


def clip_alone(member: Member) -> None:
    """Clip a slot's own gradients by their global norm, as the plain loop does."""
    limit = clip_limit(member.recipe)
    if limit:
        nn.utils.clip_grad_norm_(member.module.parameters(), limit)


def clip_stacked(blocks: Sequence[Tensor], limits: Sequence[float | None]) -> None:
    """The same for stacked gradients [N, ...], each slot by its own norm; None leaves it be."""
    if not any(limits) or not blocks:
        return
    factor = clip_stacked_factor([stacked_norm(block) for block in blocks], limits)
    scale_stacked(blocks, factor)


def stacked_norm(block: Tensor) -> Tensor:
    """[N], the norm of each row of a stacked gradient."""
    rows = block.reshape(len(block), -1)  # a parameter without dimensions has one number a slot
    found: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return found


def clip_stacked_factor(norms: Sequence[Tensor], limits: Sequence[float | None]) -> Tensor:
    """[N], by what each slot's gradients are to be multiplied; 1 where there is no limit."""
    total = torch.linalg.vector_norm(torch.stack(list(norms)), dim=0)
    limit = torch.tensor([x or float("inf") for x in limits], dtype=total.dtype)
    factor = (limit.to(total.device) / (total + 1e-6)).clamp(max=1.0)
    free = torch.tensor([not x for x in limits], device=total.device)
    return torch.where(free, torch.ones_like(factor), factor)


def scale_stacked(blocks: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each row by its slot's factor [N], in place."""
    for block in blocks:
        block.mul_(factor.view(-1, *([1] * (block.dim() - 1))).to(block.dtype))


def names_held(member: Member) -> list[str]:
    """The parameters that a trial's optimizer has, by name."""
    held = {id(p) for group in member.optimizer.param_groups for p in group["params"]}
    return [name for name, p in member.module.named_parameters() if id(p) in held]

"""Whether what a model draws can be foretold, as a measure has it, and its bytes."""

from __future__ import annotations

import functools
from dataclasses import replace

from shoal.core.spec import JobMeasure
from shoal.partition.chain import Chain
from shoal.partition.track import peak_of
from shoal.pipeline.foretell import Foretelling
from shoal.recipes.recipe import Batch
from shoal.rng import capture_rng, restore_rng


def with_draws(whole: JobMeasure, chain: Chain, batch: Batch) -> JobMeasure:
    """The measure of a model, with what is known of its draws where a step has several batches.

    Of compiled code nobody sees what it draws; and what a forward draws between its modules comes
    again where a later shard enters it, and could not be told from the model's own.
    """
    if not whole.draws or whole.compiled or chain.recipe.accumulate == 1:
        return whole
    if chain.skeleton.draws:
        return whole
    foretelling, before = Foretelling(chain, 0), capture_rng(chain.device)
    try:
        if not foretelling.look(batch).foretold:
            return whole
        num_bytes = peak_of(functools.partial(foretelling.draw_on, batch))
    except Exception:  # of a tensor that has no like, such as a nested one
        return whole
    finally:
        restore_rng(before, chain.device)
    return replace(whole, foretold=True, draw_bytes=num_bytes)

"""What a stream's thread finds of the one that submits."""

from __future__ import annotations

import contextvars
import decimal

import numpy as np

from shoal.device.streams import ThreadStream

ASKED = contextvars.ContextVar("asked", default=0)


def test_work_has_the_context_of_who_submitted_it_as_it_was_then():
    found = []

    def look():
        found.append((decimal.getcontext().prec, np.geterr()["over"], ASKED.get()))

    stream = ThreadStream("test", lambda: None)
    token = ASKED.set(1)
    with decimal.localcontext(prec=5), np.errstate(over="raise"):
        stream.submit(look)
    ASKED.reset(token)
    stream.submit(look)
    stream.close()

    usual = decimal.getcontext().prec, np.geterr()["over"], 0
    assert found == [(5, "raise", 1), usual]

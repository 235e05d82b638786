"""What a compiler leaves that was killed is no code that somebody loads."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._inductor import cpp_builder

from shoal.fusion.graphs.compiled import _whole_files


def test_what_is_compiled_has_its_name_once_it_is_whole(tmp_path, monkeypatch):
    target, ends = tmp_path / "code.so", [KeyboardInterrupt, None]

    def compile_half(command, cwd):
        words = command.split()
        Path(words[words.index("-o") + 1]).write_text("half")
        assert not target.exists()
        if end := ends.pop(0):
            raise end

    monkeypatch.setattr(cpp_builder, "run_compile_cmd", compile_half)
    with pytest.raises(KeyboardInterrupt), _whole_files():
        cpp_builder.run_compile_cmd(f"g++ some.cpp -o {target}", str(tmp_path))
    assert not target.exists()
    with _whole_files():
        cpp_builder.run_compile_cmd(f"g++ some.cpp -o {target}", str(tmp_path))
    assert target.read_text() == "half"
    assert cpp_builder.run_compile_cmd is compile_half

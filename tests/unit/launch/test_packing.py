"""A recipe on its way to a worker."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import shoal
from shoal.launch.packing import pack_recipe
from shoal.source import load_study


def test_code_keeps_the_name_of_its_file_and_tracebacks_show_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import shoal\n"
        "def model(hp):\n"
        "    raise ValueError('no such width')  # as the user wrote it\n"
        "recipe = shoal.Recipe(model=model, data=lambda hp: ([], None))\n"
        "study = shoal.Study('mine', recipe, space={'lr': 0.1}, trials=1, steps=1)\n"
    )
    study: shoal.Study = load_study(str(file)).study

    recipe: shoal.Recipe = pickle.loads(pack_recipe(study.recipe))

    try:
        recipe.model({})
    except ValueError:
        told = traceback.format_exc()
    assert f'File "{file}", line 3, in model' in told
    assert "# as the user wrote it" in told

"""Install the stand-in for CUDA as soon as torch is imported, where SHOAL_CUDA_STANDIN is set.

Python imports this module when it starts if its folder is on PYTHONPATH.
"""

import os
import sys

if os.environ.get("SHOAL_CUDA_STANDIN"):
    os.environ["SHOAL_WORKERS"] = "spawn"  # as beside a GPU

    class _AfterTorch:
        """Finds torch as usual, and installs the stand-in once the module has run."""

        def find_spec(self, name, path=None, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            from importlib.util import find_spec

            spec = find_spec(name)
            if spec is None:
                return None
            run = spec.loader.exec_module

            def run_and_install(module):
                run(module)
                spec.loader.exec_module = run
                from standin import install

                install()

            spec.loader.exec_module = run_and_install
            return spec

    sys.meta_path.insert(0, _AfterTorch())

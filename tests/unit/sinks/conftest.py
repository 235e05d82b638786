"""MLflow in memory, and in a database where it is installed."""

from __future__ import annotations

import shutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from shoal.sinks import sender

sys.path.insert(0, str(Path(__file__).parent))  # for inmemory.py

from inmemory import Metric, Pair, Server, Store


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """MLflow as this process imports it from here on."""
    server = Server()
    mlflow: Any = types.ModuleType("mlflow")
    mlflow.MlflowClient, mlflow.get_tracking_uri = server.client, lambda: "http://default"
    mlflow.entities = types.ModuleType("mlflow.entities")
    mlflow.entities.Param = mlflow.entities.RunTag = Pair
    mlflow.entities.Metric = Metric
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", mlflow.entities)
    monkeypatch.setattr(sender, "_GATHER_S", 0.0)
    return server


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty one of MLflow's, which takes seconds to make."""
    pytest.importorskip("sqlalchemy")
    mlflow = pytest.importorskip("mlflow")
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(
    params=["memory", pytest.param("sqlite", marks=pytest.mark.filterwarnings("ignore"))]
)  # SQLAlchemy warns of what MLflow does with it
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return Store("http://there", request.getfixturevalue("server"))
    shutil.copy(request.getfixturevalue("database"), tmp_path / "mlflow.db")
    return Store(f"sqlite:///{tmp_path}/mlflow.db", None)

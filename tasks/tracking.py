"""Where MLflow is; cheap to import, so that the command line can tell without loading it."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Tracking(BaseModel):
    """Where MLflow is: a tracking URI, and the folder for artifacts when the URI is a local database."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    uri: str
    artifacts: str
    pending: str

    @classmethod
    def of_store(cls, store: Path) -> Tracking:
        """`MLFLOW_TRACKING_URI` if set, else SQLite inside the store."""
        folder = store.resolve() / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}"
        return cls(uri=uri, artifacts=str(folder / "artifacts"), pending=str(store.resolve() / "pending"))

    @property
    def is_local(self) -> bool:
        """Whether the embedded database is used."""
        return self.uri.startswith("sqlite:")

"""Rows of the database, with defaults, and shorthands to add and change them."""

from typing import Any, TypeVar

from sqlalchemy import Engine as Database
from sqlmodel import Session as Db
from sqlmodel import SQLModel, select

from tx.tinker.db_models import Checkpoint, CheckpointKind, Kind, Model, TxRequest
from tx.tinker.store.database import reading, writing

R = TypeVar("R", bound=SQLModel)


def model_row(session_id: str = "s", number: int = 0, **fields: Any) -> Model:
    defaults = {"model_seq_id": number, "base_model": "m", "rank": 4, "lora": {"rank": 4}}
    return Model(model_id=f"{session_id}:train:{number}", session_id=session_id, **(defaults | fields))


def checkpoint_row(model_id: str = "s:train:0", name: str = "x", **fields: Any) -> Checkpoint:
    defaults = {"kind": CheckpointKind.TRAINING, "base_model": "m", "lora": {"rank": 4}, "size_bytes": 1}
    return Checkpoint(model_id=model_id, name=name, **(defaults | fields))


def request_row(kind: Kind = Kind.SAMPLE, **fields: Any) -> TxRequest:
    return TxRequest(kind=kind, **({"payload": b"p", "payload_hash": ""} | fields))


def add_all(db: Db, *rows: SQLModel) -> None:
    """Add rows in this order: those that others refer to come first."""
    for row in rows:
        db.add(row)
        db.flush()


def add_rows(database: Database, *rows: SQLModel) -> None:
    with writing(database) as db:
        add_all(db, *rows)


def change_row(database: Database, kind: type[SQLModel], key: Any, **fields: Any) -> None:
    with writing(database) as db:
        row = db.get_one(kind, key)
        for name, value in fields.items():
            setattr(row, name, value)


def read_row(database: Database, kind: type[R], key: Any) -> R:
    with reading(database) as db:
        return db.get_one(kind, key)


def read_rows(database: Database, kind: type[R]) -> list[R]:
    """Return all rows of a table, in the order of their primary keys."""
    with reading(database) as db:
        keys = kind.__table__.primary_key.columns  # type: ignore[attr-defined]
        return list(db.exec(select(kind).order_by(*keys)))

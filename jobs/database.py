"""The database: its URL, transactions, and the version of its tables.

The URL is SQLAlchemy's (sqlite:///FILE or postgresql+psycopg://...). Each function runs in one transaction, in a
thread, because the drivers block. Separate from the queries, so that a test can kill a process at each transaction.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from jobs.errors import DatabaseUnfit

WRITES: Final = "atoll_writes"
MIGRATION_LOCK: Final = 0x61746F6C6C  # any number that replicas share
DIALECTS: Final = ("sqlite", "postgresql")
PRAGMAS: Final = ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=30000")
"""Readers do not wait for writers; a power cut may lose the last transactions but never corrupts the file."""

IDLE_SECONDS: Final = 20
"""PostgreSQL ends a transaction whose process sends nothing more, because it stands still or its machine is gone: it
would keep its locks from the replica that takes over."""

T = TypeVar("T")


class Database:
    """Runs work in transactions. Create it with `opened`, close it with `close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # Writers of SQLite wait for each other here: where it waits itself, it sleeps up to 0.1 s and looks again.
        is_sqlite = engine.dialect.name == "sqlite"
        self.failures_count = 0
        """Transactions that the database did not carry out."""
        self._turn: AbstractContextManager[object] = threading.Lock() if is_sqlite else nullcontext()

    async def read(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a read-only transaction and return its result."""
        return await asyncio.to_thread(self._run, work, writes=False)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Run `work` in a transaction and return its result; an exception rolls everything back."""
        return await asyncio.to_thread(self._run, work, writes=True)

    def _run(self, work: Callable[[Session], T], *, writes: bool) -> T:
        turn = self._turn if writes else nullcontext()
        try:
            with turn, Session(self._engine, expire_on_commit=False) as session, session.begin():
                session.connection(execution_options={WRITES: writes})
                return work(session)
        except (OperationalError, InterfaceError):
            self.failures_count += 1
            raise

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()


@dataclass(frozen=True, slots=True)
class Migrations:
    """A folder of migrations, and the table that holds the revision that they have reached."""

    folder: Path
    version_table: str = "alembic_version"


JOB_TABLES: Final = Migrations(Path(__file__).parent / "migrations")


def opened(url: str) -> Database:
    """Return the database at a URL, with its tables migrated to this version. Raises DatabaseUnfit."""
    migrate(url)
    return Database(engine_of(url))


def engine_of(url: str, *, keys_hold: bool = True) -> Engine:
    """Return an engine with the pragmas and transactions that this service needs. `keys_hold`: enforce foreign keys on
    SQLite; off in migrations, where recreating a table would delete the rows that refer to it.

    Raises DatabaseUnfit.
    """
    address = address_of(url)
    engine = create_engine(address, pool_pre_ping=address.get_backend_name() == "postgresql")
    if address.get_backend_name() == "sqlite":
        pragmas = (*PRAGMAS, f"foreign_keys={'ON' if keys_hold else 'OFF'}")
        event.listen(engine, "connect", lambda connection, _record: _prepare_sqlite(connection, pragmas))
        event.listen(engine, "begin", _begin_sqlite)
    else:
        event.listen(engine, "connect", _prepare_postgresql)
    return engine


def address_of(url: str) -> URL:
    """Return the parts of a URL. Raises DatabaseUnfit for unsupported databases; the message hides the password."""
    try:
        address = make_url(url)
    except ArgumentError:
        raise DatabaseUnfit(
            "the URL of the database cannot be read: write sqlite:///jobs.db, or postgresql+psycopg://..."
        ) from None
    if address.get_backend_name() not in DIALECTS:
        raise DatabaseUnfit(f"{address.render_as_string()} is neither sqlite nor postgresql")
    if address.get_backend_name() == "postgresql":
        address = address.set(drivername="postgresql+psycopg")
    return address


def migrate(url: str, *, revision: str = "head", migrations: Migrations = JOB_TABLES) -> None:
    """Migrate the tables to a revision, up or down. Raises DatabaseUnfit, with nothing changed."""
    address = address_of(url)
    engine = engine_of(url, keys_hold=False)
    try:
        with engine.begin() as connection:
            if connection.dialect.name == "postgresql":  # one replica migrates, the others wait
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            _move(connection, revision, migrations)
    except (SQLAlchemyError, CommandError, OSError) as error:
        raise DatabaseUnfit(f"cannot use {address.render_as_string()}: {_first_line(error)}") from error
    finally:
        engine.dispose()


def _move(connection: Connection, revision: str, migrations: Migrations) -> None:
    config = _config(connection, migrations.folder)
    newest_first = [one.revision for one in ScriptDirectory.from_config(config).walk_revisions()]
    options = {"version_table": migrations.version_table}
    current = MigrationContext.configure(connection, opts=options).get_current_revision()
    if current is not None and current not in newest_first:
        raise DatabaseUnfit(
            f"the database has tables of revision {current}, which this Atoll does not know: run the newer one, or "
            "restore a backup"
        )
    order = [*reversed(newest_first), "head"]
    is_down = current is not None and (revision == "base" or order.index(revision) < order.index(current))
    (command.downgrade if is_down else command.upgrade)(config, revision)


def _config(connection: Connection, folder: Path) -> Config:
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def _first_line(error: Exception) -> str:
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return str(cause).partition("\n")[0]


def _prepare_sqlite(connection: Any, pragmas: Sequence[str]) -> None:  # noqa: ANN401 - a connection of the driver
    connection.isolation_level = None  # we begin transactions, not the driver
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")


def _prepare_postgresql(connection: Any, _record: object) -> None:  # noqa: ANN401 - a connection of the driver
    connection.execute(f"SET idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'")
    connection.commit()


def _begin_sqlite(connection: Connection) -> None:
    """Take the write lock at once: SQLite refuses a reader that becomes a writer later."""
    is_write = connection.get_execution_options().get(WRITES, True)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_write else "BEGIN")

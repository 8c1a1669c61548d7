-- All times are milliseconds; all money is in nano-dollars.

CREATE TABLE meta (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
INSERT INTO meta (name, value) VALUES ('identity', lower(hex(randomblob(16))));

-- The small row that every write of a run reads and most change. `n` stands for the run in all other tables.
CREATE TABLE runs (
    n           INTEGER PRIMARY KEY AUTOINCREMENT,
    id          TEXT NOT NULL UNIQUE,
    key         TEXT UNIQUE,
    position    INTEGER NOT NULL DEFAULT 0,
    live        INTEGER NOT NULL,
    embedded    INTEGER NOT NULL,
    paused      INTEGER NOT NULL,
    detached    INTEGER NOT NULL,
    budget_run  INTEGER,
    budget_fork INTEGER,
    spent       INTEGER NOT NULL DEFAULT 0,
    reserved    INTEGER NOT NULL DEFAULT 0,
    -- The largest token ever given. The lease is held while lease_owner is not null; it is valid until lease_until
    -- on the boot clock of lease_boot.
    lease_token INTEGER NOT NULL DEFAULT 0,
    lease_owner TEXT,
    lease_boot  TEXT,
    lease_until INTEGER NOT NULL DEFAULT 0,
    renewed_at  INTEGER
) STRICT;
CREATE INDEX runs_claimable ON runs (n) WHERE live = 1 AND embedded = 1;

CREATE TABLE run_views (
    run        INTEGER PRIMARY KEY,
    id         TEXT NOT NULL,
    live       INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    view       TEXT NOT NULL
) STRICT;
CREATE INDEX run_views_by_age ON run_views (created_at, id);
CREATE INDEX run_views_live ON run_views (created_at, id) WHERE live = 1;

CREATE TABLE forks (
    run      INTEGER NOT NULL,
    fork     INTEGER NOT NULL,
    attempt  INTEGER NOT NULL,
    spent    INTEGER NOT NULL DEFAULT 0,
    reserved INTEGER NOT NULL DEFAULT 0,
    view     TEXT NOT NULL,
    PRIMARY KEY (run, fork)
) STRICT, WITHOUT ROWID;

CREATE TABLE sandboxes (
    id         TEXT PRIMARY KEY,
    run        INTEGER NOT NULL,
    state      TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    view       TEXT NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX sandboxes_by_run ON sandboxes (run, created_at);
CREATE INDEX sandboxes_by_state ON sandboxes (state, created_at);

-- A stream is (run, fork, attempt): fork -1 is the run's own, attempt -1 a machine's, others are journals.
CREATE TABLE streams (
    run     INTEGER NOT NULL,
    fork    INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    length  INTEGER NOT NULL,
    PRIMARY KEY (run, fork, attempt)
) STRICT, WITHOUT ROWID;

-- id = run << 32 | position: a run's events lie together, in the order of their positions.
CREATE TABLE events (
    id      INTEGER PRIMARY KEY,
    run     INTEGER NOT NULL,
    fork    INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    seq     INTEGER NOT NULL,
    kind    TEXT NOT NULL,
    version INTEGER NOT NULL,
    at      INTEGER NOT NULL,
    source  TEXT NOT NULL,
    sandbox TEXT,
    data    TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX events_by_stream ON events (run, fork, attempt, seq);
CREATE INDEX events_by_sandbox ON events (sandbox, id) WHERE sandbox IS NOT NULL;

CREATE VIEW sandbox_events (id, sandbox_id, event_type, event_data, source, created_at) AS
    SELECT id, sandbox, kind, data, source, at FROM events WHERE sandbox IS NOT NULL;

-- Answered commands stay only for their key's sake, without data.
CREATE TABLE commands (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    run     INTEGER NOT NULL,
    key     TEXT,
    pending INTEGER NOT NULL DEFAULT 1,
    at      INTEGER NOT NULL,
    data    TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX commands_by_key ON commands (run, key) WHERE key IS NOT NULL;
CREATE INDEX commands_pending ON commands (run, id) WHERE pending = 1;

CREATE TABLE messages (
    id      INTEGER PRIMARY KEY AUTOINCREMENT,
    run     INTEGER NOT NULL,
    fork    INTEGER NOT NULL,
    key     TEXT,
    pending INTEGER NOT NULL DEFAULT 1,
    at      INTEGER NOT NULL,
    data    TEXT NOT NULL
) STRICT;
CREATE UNIQUE INDEX messages_by_key ON messages (run, fork, key) WHERE key IS NOT NULL;
CREATE INDEX messages_pending ON messages (run, fork, id) WHERE pending = 1;

-- state: 0 reserved, 1 sent, 2 settled, 3 released. The sums of the open and the settled ones stand in runs and forks.
CREATE TABLE reservations (
    run     INTEGER NOT NULL,
    request TEXT NOT NULL,
    fork    INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    amount  INTEGER NOT NULL,
    state   INTEGER NOT NULL,
    PRIMARY KEY (run, request)
) STRICT, WITHOUT ROWID;
CREATE INDEX reservations_open ON reservations (run, fork, attempt) WHERE state < 2;

CREATE TABLE processes (
    id    TEXT PRIMARY KEY,
    boot  TEXT NOT NULL,
    until INTEGER NOT NULL,
    data  TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE blobs (
    key  TEXT PRIMARY KEY,
    data BLOB NOT NULL
) STRICT;

-- The last change of each run, numbered in commit order: what a process that watches asks for.
CREATE TABLE changes (
    run    TEXT PRIMARY KEY,
    change INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX changes_by_number ON changes (change);

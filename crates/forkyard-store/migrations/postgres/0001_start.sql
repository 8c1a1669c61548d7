-- All times are milliseconds; all money is in nano-dollars.

CREATE TABLE meta (
    name  TEXT COLLATE "C" PRIMARY KEY,
    value TEXT COLLATE "C" NOT NULL
);
INSERT INTO meta (name, value) VALUES ('identity', replace(gen_random_uuid()::text, '-', ''));

-- The small row that every write of a run locks first: so positions are in commit order. `n` stands for the run in all
-- other tables.
CREATE TABLE runs (
    n           BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id          TEXT COLLATE "C" NOT NULL UNIQUE,
    key         TEXT COLLATE "C" UNIQUE,
    position    BIGINT NOT NULL DEFAULT 0,
    live        BOOLEAN NOT NULL,
    embedded    BOOLEAN NOT NULL,
    paused      BOOLEAN NOT NULL,
    detached    BOOLEAN NOT NULL,
    budget_run  BIGINT,
    budget_fork BIGINT,
    spent       BIGINT NOT NULL DEFAULT 0,
    reserved    BIGINT NOT NULL DEFAULT 0,
    -- The largest token ever given. The lease is held while lease_owner is not null; it is valid until lease_until
    -- on this server's clock.
    lease_token BIGINT NOT NULL DEFAULT 0,
    lease_owner TEXT,
    lease_until BIGINT NOT NULL DEFAULT 0,
    renewed_at  BIGINT,
    -- Counts what watchers want to hear of.
    changes     BIGINT NOT NULL DEFAULT 0
    -- Room on the page: most updates change no indexed column and stay there.
) WITH (fillfactor = 50);
CREATE INDEX runs_claimable ON runs (n) WHERE live AND embedded;

CREATE TABLE run_views (
    run        BIGINT PRIMARY KEY,
    id         TEXT COLLATE "C" NOT NULL,
    live       BOOLEAN NOT NULL,
    created_at BIGINT NOT NULL,
    view       TEXT NOT NULL
);
CREATE INDEX run_views_by_age ON run_views (created_at, id);
CREATE INDEX run_views_live ON run_views (created_at, id) WHERE live;

CREATE TABLE forks (
    run      BIGINT NOT NULL,
    fork     BIGINT NOT NULL,
    attempt  BIGINT NOT NULL,
    spent    BIGINT NOT NULL DEFAULT 0,
    reserved BIGINT NOT NULL DEFAULT 0,
    view     TEXT NOT NULL,
    PRIMARY KEY (run, fork)
);

CREATE TABLE sandboxes (
    id         TEXT COLLATE "C" PRIMARY KEY,
    run        BIGINT NOT NULL,
    state      TEXT COLLATE "C" NOT NULL,
    created_at BIGINT NOT NULL,
    view       TEXT NOT NULL
);
CREATE INDEX sandboxes_by_run ON sandboxes (run, created_at);
CREATE INDEX sandboxes_by_state ON sandboxes (state, created_at);

-- A stream is (run, fork, attempt): fork -1 is the run's own, attempt -1 a machine's, others are journals.
CREATE TABLE streams (
    run     BIGINT NOT NULL,
    fork    BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    length  BIGINT NOT NULL,
    PRIMARY KEY (run, fork, attempt)
);

-- id = run << 32 | position: a run's events lie together, in the order of their positions.
CREATE TABLE events (
    id      BIGINT PRIMARY KEY,
    run     BIGINT NOT NULL,
    fork    BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    seq     BIGINT NOT NULL,
    kind    TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    at      BIGINT NOT NULL,
    source  TEXT COLLATE "C" NOT NULL,
    sandbox TEXT COLLATE "C",
    data    TEXT NOT NULL
);
CREATE UNIQUE INDEX events_by_stream ON events (run, fork, attempt, seq);
CREATE INDEX events_by_sandbox ON events (sandbox, id) WHERE sandbox IS NOT NULL;

CREATE VIEW sandbox_events (id, sandbox_id, event_type, event_data, source, created_at) AS
    SELECT id, sandbox, kind, data, source, at FROM events WHERE sandbox IS NOT NULL;

-- Answered commands stay only for their key's sake, without data.
CREATE TABLE commands (
    id      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run     BIGINT NOT NULL,
    key     TEXT COLLATE "C",
    pending BOOLEAN NOT NULL DEFAULT true,
    at      BIGINT NOT NULL,
    data    TEXT NOT NULL
);
CREATE UNIQUE INDEX commands_by_key ON commands (run, key) WHERE key IS NOT NULL;
CREATE INDEX commands_pending ON commands (run, id) WHERE pending;

CREATE TABLE messages (
    id      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    run     BIGINT NOT NULL,
    fork    BIGINT NOT NULL,
    key     TEXT COLLATE "C",
    pending BOOLEAN NOT NULL DEFAULT true,
    at      BIGINT NOT NULL,
    data    TEXT NOT NULL
);
CREATE UNIQUE INDEX messages_by_key ON messages (run, fork, key) WHERE key IS NOT NULL;
CREATE INDEX messages_pending ON messages (run, fork, id) WHERE pending;

-- state: 0 reserved, 1 sent, 2 settled, 3 released. The sums of the open and the settled ones stand in runs and forks.
CREATE TABLE reservations (
    run     BIGINT NOT NULL,
    request TEXT COLLATE "C" NOT NULL,
    fork    BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    amount  BIGINT NOT NULL,
    state   BIGINT NOT NULL,
    PRIMARY KEY (run, request)
);
CREATE INDEX reservations_open ON reservations (run, fork, attempt) WHERE state < 2;

CREATE TABLE processes (
    id    TEXT COLLATE "C" PRIMARY KEY,
    until BIGINT NOT NULL,
    data  TEXT NOT NULL
);

CREATE TABLE blobs (
    key  TEXT COLLATE "C" PRIMARY KEY,
    data BYTEA NOT NULL
);

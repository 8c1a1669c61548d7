-- Who may use the API. Of a token only the hash of its secret is kept. A session belongs to the token that opened it.
CREATE TABLE tokens (
    id         TEXT PRIMARY KEY,
    parent     TEXT,
    name       TEXT NOT NULL,
    scope      TEXT NOT NULL,
    hash       TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX tokens_by_parent ON tokens (parent) WHERE parent IS NOT NULL;

-- Who steered what.
CREATE TABLE audit (
    id     INTEGER PRIMARY KEY AUTOINCREMENT,
    at     INTEGER NOT NULL,
    token  TEXT NOT NULL,
    who    TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;
CREATE INDEX audit_by_target ON audit (target, id);

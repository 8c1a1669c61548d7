-- Who may use the API. Of a token only the hash of its secret is kept. A session belongs to the token that opened it.
CREATE TABLE tokens (
    id         TEXT COLLATE "C" PRIMARY KEY,
    parent     TEXT COLLATE "C",
    name       TEXT NOT NULL,
    scope      TEXT COLLATE "C" NOT NULL,
    hash       TEXT COLLATE "C" NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT,
    revoked_at BIGINT
);
CREATE INDEX tokens_by_parent ON tokens (parent) WHERE parent IS NOT NULL;

-- Who steered what.
CREATE TABLE audit (
    id     BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at     BIGINT NOT NULL,
    token  TEXT COLLATE "C" NOT NULL,
    who    TEXT NOT NULL,
    action TEXT COLLATE "C" NOT NULL,
    target TEXT COLLATE "C" NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX audit_by_target ON audit (target, id);

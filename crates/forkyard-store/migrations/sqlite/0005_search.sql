-- How a run ended: null while it is live, empty if nobody said.
ALTER TABLE run_views ADD COLUMN ended_as TEXT;
CREATE INDEX run_views_by_end ON run_views (ended_as, created_at, id);

-- What a search looks through, apart from the views, which are large.
CREATE TABLE run_words (
    run   INTEGER PRIMARY KEY,
    words TEXT NOT NULL
) STRICT;

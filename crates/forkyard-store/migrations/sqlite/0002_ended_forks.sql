-- A fork that has ended reserves nothing and sends nothing.
ALTER TABLE forks ADD COLUMN ended INTEGER NOT NULL DEFAULT 0;

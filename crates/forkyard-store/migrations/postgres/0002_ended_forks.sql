-- A fork that has ended reserves nothing and sends nothing.
ALTER TABLE forks ADD COLUMN ended BOOLEAN NOT NULL DEFAULT false;

-- How long a stream is, its last event tells by the index.
DROP TABLE streams;

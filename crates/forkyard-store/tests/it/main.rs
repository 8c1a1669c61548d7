mod postgres;
mod sqlite;

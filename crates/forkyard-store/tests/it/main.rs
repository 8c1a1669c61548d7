mod sqlite;

mod child;
mod faults;
mod postgres;
mod processes;
mod sqlite;

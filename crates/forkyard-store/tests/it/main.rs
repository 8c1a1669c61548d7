mod child;
mod faults;
mod memory;
mod postgres;
mod processes;
mod sqlite;

mod fork;
mod harness;
mod old_logs;
mod random;
mod run;

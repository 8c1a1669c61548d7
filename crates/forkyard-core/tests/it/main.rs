mod fork;
mod harness;
mod random;
mod run;

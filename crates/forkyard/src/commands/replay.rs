use clap::Args;
use forkyard_core::ForkRef;

/// Play the session of a fork again, in the terminal.
#[derive(Debug, Clone, Args)]
pub struct ReplayArgs {
    /// The fork.
    #[arg(value_name = "RUN/N")]
    pub fork: ForkRef,
    /// How many times faster than it was; 0 shows all at once.
    #[arg(long, value_name = "FACTOR", default_value_t = 4.0, value_parser = speed)]
    pub speed: f64,
}

/// Finite, not negative, and slow enough to be seen.
fn speed(text: &str) -> Result<f64, String> {
    let speed: Option<f64> = text.parse().ok();
    speed.filter(|s| (0.0..=1000.0).contains(s)).ok_or_else(|| "write a number from 0 to 1000".into())
}

use clap::Args;

/// List runs, newest first.
#[derive(Debug, Clone, Args)]
pub struct ListArgs {
    /// How many.
    #[arg(short, long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub limit: u32,
    /// Only those that have not ended.
    #[arg(long)]
    pub live: bool,
}

use super::run_options::RunOptions;
use clap::Args;

/// Run a small bundled repository with a model that needs no key, to see it all work.
#[derive(Debug, Clone, Args)]
pub struct DemoArgs {
    #[command(flatten)]
    pub options: RunOptions,
}

//! What the examples share: a home of their own that is gone afterwards, and a model.

use forkyard::{Forkyard, Options, Result};

/// The model that was named as the first argument, such as `sonnet`; else a script, which needs no key.
#[allow(dead_code, reason = "sandboxes by hand need none")]
pub fn model(script: &str) -> String {
    let script = format!("script:{}/examples/scripts/{script}.toml", env!("CARGO_MANIFEST_DIR"));
    std::env::args().nth(1).unwrap_or(script)
}

/// Kept in a temporary folder; a program of yours would keep it in the user's home with `Options::new()`.
pub async fn open() -> Result<(Forkyard, tempfile::TempDir)> {
    let home = tempfile::tempdir().expect("a temporary folder");
    let yard = Forkyard::open(Options::new().home(home.path())).await?;
    Ok((yard, home))
}

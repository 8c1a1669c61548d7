//! The dashboard in a real Chromium, against the real server with scripted models. The scenarios are programs in
//! `web/tests`; each starts a server of its own and fails on whatever the page says on its console.

use std::path::{Path, PathBuf};
use std::process::Command;

/// What `cargo xtask setup` installs.
fn browser() -> Option<(PathBuf, PathBuf)> {
    let web = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../web");
    let chromium = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
    let chromium = chromium.iter().map(PathBuf::from).find(|p| p.is_file())?;
    web.join("node_modules/playwright-core").is_dir().then_some((web, chromium))
}

fn scenario(name: &str) {
    let Some((web, chromium)) = browser() else {
        assert!(
            std::env::var_os("FORKYARD_TEST_REQUIRE").is_none(),
            "Chromium or web/node_modules is missing: cargo xtask setup"
        );
        return;
    };
    let done = Command::new("node")
        .arg(web.join("tests").join(format!("{name}.mjs")))
        .env("FORKYARD_BIN", env!("CARGO_BIN_EXE_forkyard"))
        .env("FORKYARD_CHROMIUM", chromium)
        .output()
        .unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{said}");
    // Figures, for those who look.
    print!("{said}");
}

#[test]
fn a_run_is_started_steered_compared_and_played_again() {
    scenario("steer");
}

#[test]
fn a_sandbox_has_figures_files_and_a_shell() {
    scenario("shell");
}

#[test]
fn what_others_wrote_is_text_in_every_place() {
    scenario("hostile");
}

#[test]
fn a_killed_server_costs_no_event_and_doubles_none() {
    scenario("restart");
}

#[test]
fn all_runs_are_searched_and_followed() {
    scenario("runs");
}

#[test]
fn thousands_of_events_scroll() {
    scenario("flood");
}

#[test]
fn everybody_can_use_it_who_may() {
    scenario("access");
}

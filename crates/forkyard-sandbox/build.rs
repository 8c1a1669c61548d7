//! Builds the guest, one static program, and leaves it in `OUT_DIR/forkyard-guest` for the library to embed.
//!
//! It is built by cargo itself, with a target folder of its own, so that a plain `cargo build` of a fresh clone is enough.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let guest = here.join("../forkyard-guest");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={}", guest.join("src").display());
    println!("cargo:rerun-if-changed={}", guest.join("Cargo.toml").display());

    let target = env::var("TARGET").expect("cargo sets TARGET");
    let release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let target_dir = out.join("guest-target");
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"));
    cargo
        .args(["build", "--release", "--bin", "forkyard-guest", "--features", "program", "--target", &target])
        .arg("--manifest-path")
        .arg(guest.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(&target_dir);
    // Small and alone: it is mapped into every sandbox. Linking across crates takes long, so only a release does it.
    let lto = if release { "\"fat\"" } else { "false" };
    for setting in
        ["panic=\"abort\"", "opt-level=\"s\"", "strip=\"symbols\"", "codegen-units=4", "debug=false"]
    {
        cargo.arg("--config").arg(format!("profile.release.{setting}"));
    }
    cargo.arg("--config").arg(format!("profile.release.lto={lto}"));
    // What the outer build was told is not meant for the guest.
    for name in
        ["CARGO_ENCODED_RUSTFLAGS", "CARGO_BUILD_TARGET", "RUSTC_WORKSPACE_WRAPPER", "CARGO_TARGET_DIR"]
    {
        cargo.env_remove(name);
    }
    cargo.env("RUSTFLAGS", "-C target-feature=+crt-static -C relocation-model=static");
    let status = cargo.status().expect("cargo runs, since it runs this");
    assert!(status.success(), "the guest did not build");

    let built = target_dir.join(&target).join("release/forkyard-guest");
    copy_if_changed(&built, &out.join("forkyard-guest"));
}

fn copy_if_changed(from: &Path, to: &Path) {
    let new = std::fs::read(from).expect("the guest was just built");
    if std::fs::read(to).ok().as_deref() != Some(&new) {
        std::fs::write(to, new).expect("OUT_DIR can be written");
    }
}

//! A small repository to work on.

use std::path::Path;
use std::process::Command;

/// A shell script with a fault, and its test.
pub fn make(dir: &Path) -> String {
    let repo = dir.join("repo");
    std::fs::create_dir_all(repo.join("tests")).expect("a folder");
    let files = [
        ("add.sh", "#!/bin/sh\n# Prints the sum of two numbers.\necho $(($1 - $2))\n"),
        ("tests/run.sh", "#!/bin/sh\n[ \"$(sh add.sh 2 3)\" = 5 ] && echo PASS || { echo FAIL; exit 1; }\n"),
    ];
    for (path, text) in files {
        std::fs::write(repo.join(path), text).expect("a file");
    }
    for args in [&["init", "-q", "-b", "main"][..], &["add", "-A"], &["commit", "-q", "-m", "A sum"]] {
        let done = Command::new("git")
            .args([
                "-c",
                "user.name=example",
                "-c",
                "user.email=example@localhost",
                "-c",
                "commit.gpgsign=false",
            ])
            .args(args)
            .current_dir(&repo)
            .status();
        assert!(done.expect("git is installed").success());
    }
    repo.display().to_string()
}

use super::World;

#[test]
fn every_shell_gets_a_script_that_knows_the_commands() {
    let w = World::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = w.run(&["completions", shell]);
        assert_eq!(ran.code, 0, "{shell}");
        for command in ["config", "trust", "doctor"] {
            assert!(ran.stdout.contains(command), "{shell} {command}");
        }
    }
}

#[test]
fn bash_itself_takes_the_script() {
    let w = World::new();
    let script = w.repo().join("script");
    w.write(&script, &w.run(&["completions", "bash"]).stdout);
    let checked = std::process::Command::new("bash").arg("-n").arg(&script).status().unwrap();
    assert!(checked.success());
}

#[test]
fn bash_completes_commands_and_runs() {
    let w = World::with_commit();
    let run = w.ended(&[]);
    let script = w.repo().join("script");
    w.write(&script, &w.run(&["completions", "bash"]).stdout);
    let complete = |words: &str, at: usize| {
        let program = std::path::Path::new(env!("CARGO_BIN_EXE_forkyard")).parent().unwrap();
        let line = format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD={at}; \
             _forkyard_with_runs forkyard \"${{COMP_WORDS[{at}]}}\" \"${{COMP_WORDS[{}]}}\"; echo ${{COMPREPLY[@]}}",
            script.display(),
            at - 1
        );
        let ran = std::process::Command::new("bash")
            .args(["--norc", "-c", &line])
            .env("PATH", format!("{}:/usr/bin:/bin", program.display()))
            .env("FORKYARD_HOME", w.home())
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&ran.stderr), "");
        String::from_utf8(ran.stdout).unwrap().trim().to_string()
    };
    assert_eq!(complete("forkyard comp", 1), "compare completions");
    assert_eq!(complete("forkyard status ''", 2), run);
    assert_eq!(complete(&format!("forkyard apply {}", &run[..4]), 2), run);
}

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

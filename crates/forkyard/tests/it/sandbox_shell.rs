//! A sandbox's shell on a terminal, and what it reached of the network.

use super::World;
use super::terminal::Terminal;

#[test]
fn a_shell_has_the_keys_the_size_and_the_last_word() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--network", "none", "--name", "box1"]).code, 0);
    is_a_terminals(&w, "box1");
}

/// The shell of a sandbox, by every provider.
pub fn is_a_terminals(w: &World, sandbox: &str) {
    let mut t = Terminal::start(w, &["sandbox", "shell", sandbox], (80, 24));
    // What is typed is on the screen, too: what is waited for is not in it.
    t.press("echo si''ze $(stty size)\r");
    t.wait_for("size 24 80");
    assert!(!t.is_as_before(), "keys are not the shell's");
    t.resize(100, 30);
    t.press("until [ \"$(stty size)\" = '30 100' ]; do sleep 0.05; done; echo re''sized\r");
    t.wait_for("resized");
    // It ends the command inside, and neither the shell nor the program here.
    t.press("sh -c 'echo be''gun; exec sleep 600'\r");
    t.wait_for("begun");
    t.press("\x03");
    t.press("echo st''ill $?\r");
    t.wait_for("still 130");
    t.press("exit 7\r");
    assert_eq!(t.end().code(), Some(7));
    assert!(t.is_as_before());

    // A program of the user's choice, and one that is not there.
    let mut t = Terminal::start(w, &["sandbox", "shell", sandbox, "sh", "-c", "exit 3"], (80, 24));
    assert_eq!(t.end().code(), Some(3));
    let mut t = Terminal::start(w, &["sandbox", "shell", sandbox, "no-such-program"], (80, 24));
    t.wait_for("command not found");
    assert_eq!(t.end().code(), Some(127));
    assert!(t.is_as_before());
}

#[test]
fn what_a_sandbox_was_refused_is_told_also_after_its_end() {
    let w = World::new();
    assert_eq!(w.run(&["sandbox", "create", "--name", "box1"]).code, 0);
    let ran = w.run(&["sandbox", "egress", "box1"]);
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "Nothing is recorded of box1.\n"), "{}", ran.stderr);
    let ask = "exec 3<>/dev/tcp/127.0.0.1/3128; \
               printf 'CONNECT refused.example:443 HTTP/1.1\\r\\nHost: refused.example:443\\r\\n\\r\\n' >&3; \
               head -n 1 <&3";
    let ran = w.run(&["sandbox", "exec", "box1", "--", "bash", "-c", ask]);
    assert!(ran.code == 0 && ran.stdout.contains("403"), "{}{}", ran.stdout, ran.stderr);
    assert_eq!(w.run(&["sandbox", "rm", "box1"]).code, 0);
    for more in [&[][..], &["--refused"]] {
        let ran = w.run(&[&["sandbox", "egress", "box1"], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        let row = ran.stdout.lines().find(|line| line.contains("refused.example:443"));
        assert!(row.is_some_and(|row| row.contains("denied")), "{}", ran.stdout);
    }
    let json = w.json(&["--json", "sandbox", "egress", "box1"]);
    assert_eq!((&json["schema"], &json["sandbox_id"]), (&"forkyard.sandbox_egress/1".into(), &"box1".into()));
    let [told] = json["decisions"].as_array().unwrap().as_slice() else { panic!("{json}") };
    assert_eq!((&told["host"], &told["decision"]), (&"refused.example".into(), &"denied".into()), "{json}");
    let ran = w.run(&["--server", "http://127.0.0.1:1", "sandbox", "egress", "box1"]);
    assert_eq!(ran.code, 2, "{}", ran.stderr);
}

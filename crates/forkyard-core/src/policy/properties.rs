//! What must hold for any text.

use proptest::prelude::*;
use serde_json::json;

use super::*;

fn bash(script: &str) -> Decision {
    let input = json!({ "command": script });
    evaluate(
        &PolicyConfig::default(),
        &ToolCall { tool: "Bash", input: &input, number_in_turn: 1, resolved_path: None },
    )
}

/// Text made of what shells care about, so that odd nestings come up often.
fn shellish() -> impl Strategy<Value = String> {
    let pieces = prop::sample::select(vec![
        "rm",
        "-rf",
        "/",
        " ",
        "\n",
        ";",
        "&",
        "&&",
        "|",
        "(",
        ")",
        "((",
        "))",
        "$(",
        "`",
        "'",
        "\"",
        "\\",
        "$",
        "${",
        "}",
        "{",
        ",",
        "<<EOF\n",
        "EOF\n",
        "<<<",
        "<(",
        ">",
        ">>",
        "&>",
        "2>",
        "case",
        " x in ",
        "esac",
        "for ",
        "if ",
        "[[ ",
        " ]]",
        "function f ",
        "f()",
        "eval ",
        "bash -c ",
        "xargs ",
        "sudo ",
        "~",
        "*",
        "[",
        "]",
        "=",
        "a=",
        "$'",
        "\\x",
        "#",
        "é",
        "\u{0}",
        ":-",
        "echo ",
        "find . -exec ",
    ]);
    prop::collection::vec(pieces, 0..60).prop_map(|v| v.concat())
}

const NAMED: &[&str] = &[
    "rm -rf /",
    "sudo rm x",
    "mkfs.ext4 /dev/sda",
    "dd if=/dev/zero",
    "chmod 000 x",
    "chown root x",
    "fdisk",
    "parted",
    "shutdown now",
    "reboot",
    "halt",
    "poweroff",
    "echo x > /dev/sda",
];

/// Ways to put a command somewhere that keep it a command.
fn wrapped(command: &str, how: u8) -> String {
    match how % 14 {
        0 => command.to_string(),
        1 => format!("true; {command}"),
        2 => format!("ls && {command}"),
        3 => format!("ls | {command}"),
        4 => format!("({command})"),
        5 => format!("{{ {command}; }}"),
        6 => format!("echo $({command})"),
        7 => format!("echo \"`{command}`\""),
        8 => format!("bash -c '{command}'"),
        9 => format!("if true; then\n{command}\nfi"),
        10 => format!("A=1 B='x y' {command}"),
        11 => format!("nohup {command} &"),
        12 => format!("cat <<E | sh\n{command}\nE\n"),
        _ => format!("for i in 1 2; do {command}; done"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_script_gets_an_answer(script in shellish()) {
        let _ = bash(&script);
    }

    #[test]
    fn any_text_gets_an_answer(script in ".{0,200}", path in ".{0,100}") {
        let _ = bash(&script);
        let input = json!({ "file_path": path, "path": path, "pattern": path });
        for tool in ["Read", "Write", "Glob", "Grep", "Edit", "Task"] {
            let call = ToolCall { tool, input: &input, number_in_turn: 1, resolved_path: Some(&path) };
            let _ = evaluate(&PolicyConfig::default(), &call);
        }
    }

    #[test]
    fn what_the_list_names_is_denied_wherever_it_stands(
        which in 0..NAMED.len(), outer in any::<u8>(), inner in any::<u8>(), before in "[a-z ]{0,12}",
    ) {
        // Only a simple command can follow assignments or a wrapper, and quotes of one kind do not nest.
        let inner = match (inner % 14, outer % 14) {
            // `((` would be arithmetic.
            (7 | 8 | 10 | 12, _) | (_, 10 | 11) | (9, 12) | (4, 4 | 6) => 0,
            (inner, _) => inner,
        };
        let command = wrapped(&wrapped(NAMED[which], inner), outer);
        let script = format!("echo {before}\n{command}");
        prop_assert_ne!(bash(&script), Decision::Allow, "{}", script);
    }

    #[test]
    fn blocked_paths_stay_blocked_however_they_are_written(
        tail in "[a-z./]{0,12}", ups in 0..4_usize, blocked in prop::sample::select(vec!["/etc", "/usr", "/proc"]),
    ) {
        prop_assume!(!tail.contains(".."));
        let path = format!("/workspace/a/../../{blocked}/./{tail}");
        let climbs = format!("{}{blocked}/{tail}", "../".repeat(ups + 1));
        let input = json!({ "file_path": climbs.trim_start_matches('/') });
        let call = ToolCall { tool: "Read", input: &input, number_in_turn: 1, resolved_path: Some(&path) };
        // From /workspace one step up is the root already.
        prop_assert_ne!(evaluate(&PolicyConfig::default(), &call), Decision::Allow);
    }
}

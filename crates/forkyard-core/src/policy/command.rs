//! Judges a shell script: the configured list of blocked commands, writes into blocked places, secrets, devices.

use super::invocation::{self, Invocation};
use super::paths::{Relation, relation, resolve};
use super::shell::{Start, Word};
use super::{Decision, PolicyConfig, Rule, glob};

/// Devices that everybody may write to. `/dev/shm` is a directory.
const HARMLESS_DEVICES: &[&str] = &[
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/stdout",
    "/dev/stderr",
    "/dev/stdin",
    "/dev/tty",
    "/dev/ptmx",
    "/dev/fd",
    "/dev/shm",
    "/dev/pts",
];

pub fn judge(config: &PolicyConfig, script: &str) -> Decision {
    let start = Start { cwd: Some(&config.workspace), home: &config.home, depth: 0 };
    let found = invocation::of_script(script, &start);
    if found.too_complex {
        return Decision::deny(
            Rule::TooComplex,
            "the command is too long or too deeply nested to be judged; put it into a script file or split it",
        );
    }
    if found.fork_bomb && config.block_fork_bombs {
        return Decision::deny(Rule::BlockedCommand, "a function that keeps starting itself (fork bomb)");
    }
    for invocation in &found.all {
        if let Err(denial) = judge_one(config, invocation) {
            return denial;
        }
    }
    Decision::Allow
}

/// Err is the denial.
type Judged = Result<(), Decision>;

fn denial(rule: Rule, reason: String) -> Judged {
    Err(Decision::deny(rule, reason))
}

fn judge_one(config: &PolicyConfig, invocation: &Invocation) -> Judged {
    if let Some(pattern) = config.blocked_commands.iter().find(|p| is_named_by(config, p, invocation)) {
        return denial(Rule::BlockedCommand, format!("the command is blocked by the rule `{pattern}`"));
    }
    for redirect in &invocation.redirects {
        let path = absolute(config, invocation, &redirect.target);
        if redirect.writes {
            deny_write(config, &path)?;
        }
        deny_secret(config, &path)?;
    }
    for arg in &invocation.args {
        deny_secret(config, &absolute(config, invocation, arg))?;
        // `--output=/etc/x`, `of=/dev/sda`, `-I~/.ssh`: the value is a path as well.
        if let Some((_, value)) = arg.text.split_once('=') {
            let value = Word { text: value.to_string(), ..arg.clone() };
            deny_secret(config, &absolute(config, invocation, &value))?;
        }
    }
    for target in written(invocation) {
        let path = absolute(config, invocation, &target);
        deny_write(config, &path)?;
        if is_recursive_removal(invocation) {
            deny_removal(config, &path)?;
        }
    }
    Ok(())
}

/// The word as an absolute path. Where the working directory is not known, relative paths are taken as the workspace's.
fn absolute(config: &PolicyConfig, invocation: &Invocation, word: &Word) -> String {
    let cwd = invocation.cwd.as_deref().unwrap_or(&config.workspace);
    resolve(cwd, &word.text, &config.home).unwrap_or_else(|| cwd.to_string())
}

fn deny_write(config: &PolicyConfig, path: &str) -> Judged {
    if relation(path, "/dev") == Relation::Within {
        let harmless = HARMLESS_DEVICES.iter().any(|d| relation(path, d) == Relation::Within);
        if !harmless {
            return denial(Rule::Device, format!("{} is a device", shown(path)));
        }
        return Ok(());
    }
    match config.blocked_roots().find(|b| relation(path, b) == Relation::Within) {
        Some(b) => denial(Rule::BlockedPath, format!("writing to {} is blocked ({b})", shown(path))),
        None => Ok(()),
    }
}

fn deny_secret(config: &PolicyConfig, path: &str) -> Judged {
    match config.secret_roots().find(|s| relation(path, s) == Relation::Within) {
        Some(s) => denial(Rule::BlockedPath, format!("{} may hold credentials ({s})", shown(path))),
        None => Ok(()),
    }
}

/// Removing a directory that holds a blocked one removes that, too.
fn deny_removal(config: &PolicyConfig, path: &str) -> Judged {
    match config.blocked_roots().find(|b| relation(path, b) != Relation::Apart) {
        Some(b) => denial(
            Rule::BlockedCommand,
            format!("removing {} would remove {b}; name what is to go", shown(path)),
        ),
        None => Ok(()),
    }
}

fn shown(path: &str) -> String {
    path.replace(super::shell::UNKNOWN, "…")
}

fn is_recursive_removal(invocation: &Invocation) -> bool {
    match invocation.name.as_str() {
        "rm" => has_flag(invocation, 'r') || has_flag(invocation, 'R'),
        "find" => true,
        _ => false,
    }
}

/// Words that are no options. After `--` everything is one.
fn positionals(args: &[Word]) -> Vec<&Word> {
    let mut out = Vec::new();
    let mut only_positionals = false;
    for word in args {
        if !only_positionals && word.text == "--" {
            only_positionals = true;
        } else if only_positionals || !word.text.starts_with('-') || word.text == "-" {
            out.push(word);
        }
    }
    out
}

/// The files that a well-known program writes, moves or removes.
fn written(invocation: &Invocation) -> Vec<Word> {
    let args = &invocation.args;
    let all = || positionals(args).into_iter().cloned().collect::<Vec<_>>();
    let last = || {
        let named = args.iter().position(|w| w.text == "-t").and_then(|i| args.get(i + 1));
        named.or(positionals(args).last().copied()).cloned().into_iter().collect::<Vec<_>>()
    };
    match invocation.name.as_str() {
        "rm" | "rmdir" | "unlink" | "shred" | "mv" | "tee" | "touch" | "mkdir" | "truncate" | "mkfifo"
        | "mknod" => all(),
        "chmod" | "chown" | "chgrp" => all().into_iter().skip(1).collect(),
        "cp" | "ln" | "install" | "rsync" | "link" => last(),
        "sed" | "perl" if args.iter().any(|w| w.text.starts_with("-i") || w.text == "--in-place") => {
            all().into_iter().skip(1).collect()
        }
        "dd" => {
            let of = args.iter().filter_map(|w| Some((w, w.text.strip_prefix("of=")?)));
            of.map(|(w, text)| Word { text: text.to_string(), ..w.clone() }).collect()
        }
        "find" if args.iter().any(|w| w.text == "-delete") => {
            args.iter().take_while(|w| !w.text.starts_with(['-', '(', '!'])).cloned().collect()
        }
        _ => Vec::new(),
    }
}

/// Whether a short flag is given, alone or in a bundle, or its long form.
fn has_flag(invocation: &Invocation, letter: char) -> bool {
    let long = match letter {
        'r' | 'R' => "--recursive",
        'f' => "--force",
        _ => "",
    };
    invocation.args.iter().take_while(|w| w.text != "--").any(|w| {
        let text = w.text.as_str();
        match text.strip_prefix('-') {
            Some(rest) if rest.starts_with('-') => {
                !long.is_empty() && text.len() > 3 && long.starts_with(text)
            }
            Some(rest) => rest.contains(letter),
            None => false,
        }
    })
}

/// Options of git that take the next word, so that `git -C dir push` is a push.
const GIT_OPTIONS_WITH_VALUE: &[&str] = &["-C", "-c", "--git-dir", "--work-tree", "--namespace"];

/// Whether a rule of the list names this invocation. A rule is words: a program (with `*`; `sudo` in front means that it is
/// elevated); flags that must be given; paths that some argument must be; `key=` prefixes; any other word stands at its
/// place among the arguments that are no flags.
fn is_named_by(config: &PolicyConfig, rule: &str, invocation: &Invocation) -> bool {
    let mut words: Vec<&str> = rule.split_whitespace().collect();
    if words.len() > 1 && words[0] == "sudo" {
        if !invocation.elevated {
            return false;
        }
        words.remove(0);
    }
    let Some((program, rest)) = words.split_first() else { return false };
    if invocation.name.is_empty() || !glob::matches(program, &invocation.name) {
        return false;
    }
    let mut args = positionals(&invocation.args);
    if *program == "git" {
        let skip: Vec<&Word> = invocation
            .args
            .windows(2)
            .filter(|pair| GIT_OPTIONS_WITH_VALUE.contains(&pair[0].text.as_str()))
            .map(|pair| &pair[1])
            .collect();
        args.retain(|a| !skip.iter().any(|s| std::ptr::eq(*s, *a)));
    }
    let mut place = 0;
    rest.iter().all(|word| match *word {
        flag if flag.starts_with("--") => invocation
            .args
            .iter()
            .any(|a| a.text == flag || a.text.strip_prefix(flag).is_some_and(|rest| rest.starts_with('='))),
        flags if flags.starts_with('-') && flags.len() > 1 => {
            flags.chars().skip(1).all(|letter| has_flag(invocation, letter))
        }
        path if path.starts_with(['/', '~']) => {
            let Some(wanted) = resolve("/", path, &config.home) else { return false };
            args.iter().any(|a| {
                let given = absolute(config, invocation, a);
                let given = given.strip_suffix("/*").unwrap_or(&given);
                let given = if given.is_empty() { "/" } else { given };
                given == wanted
            })
        }
        key if key.ends_with('=') => args.iter().any(|a| a.text.starts_with(key)),
        text => {
            place += 1;
            args.get(place - 1).is_some_and(|a| glob::matches(text, &a.text))
        }
    })
}

//! From the commands of a script to the programs they would run: wrappers such as `sudo` and `xargs` are taken off, scripts
//! inside of scripts are read in turn.

use super::shell::{self, Command, MAX_COMMANDS, MAX_DEPTH, Redirect, Start, Word, constant_output};

/// One program with its arguments, as it would be run.
#[derive(Debug, Clone)]
pub struct Invocation {
    /// Without its directory.
    pub name: String,
    pub args: Vec<Word>,
    pub redirects: Vec<Redirect>,
    pub cwd: Option<String>,
    /// By `sudo`, `doas` or `su`.
    pub elevated: bool,
}

#[derive(Debug, Default)]
pub struct Invocations {
    pub all: Vec<Invocation>,
    pub fork_bomb: bool,
    pub too_complex: bool,
}

/// A program that runs the program named by its arguments.
struct Wrapper {
    name: &'static str,
    /// Its options that take the next word as a value.
    with_value: &'static [&'static str],
    /// Words of its own before the program: `timeout 5 …`.
    positionals: usize,
}

const fn wrapper(name: &'static str, with_value: &'static [&'static str], positionals: usize) -> Wrapper {
    Wrapper { name, with_value, positionals }
}

const WRAPPERS: &[Wrapper] = &[
    wrapper(
        "sudo",
        &["-u", "-g", "-h", "-p", "-C", "-r", "-t", "-T", "-U", "-D", "-R", "--user", "--group"],
        0,
    ),
    wrapper("doas", &["-u", "-C"], 0),
    wrapper("env", &["-u", "-C", "--unset", "--chdir"], 0),
    wrapper("nohup", &[], 0),
    wrapper("time", &["-f", "-o"], 0),
    wrapper("nice", &["-n", "--adjustment"], 0),
    wrapper("ionice", &["-c", "-n", "-p"], 0),
    wrapper("timeout", &["-s", "-k", "--signal", "--kill-after"], 1),
    wrapper("stdbuf", &["-i", "-o", "-e"], 0),
    wrapper("setsid", &[], 0),
    wrapper("exec", &["-a"], 0),
    wrapper("command", &[], 0),
    wrapper("builtin", &[], 0),
    wrapper("busybox", &[], 0),
    wrapper("toybox", &[], 0),
    wrapper("chroot", &[], 1),
    wrapper("unshare", &[], 0),
    wrapper("strace", &["-e", "-o", "-s", "-p"], 0),
    wrapper("chrt", &[], 1),
    wrapper("taskset", &[], 1),
    wrapper("flock", &["-w", "-E"], 1),
    wrapper("watch", &["-n", "--interval"], 0),
    wrapper("setpriv", &["--reuid", "--regid", "--groups"], 0),
    wrapper("faketime", &[], 1),
    wrapper(
        "xargs",
        &["-I", "-n", "-P", "-L", "-d", "-E", "-s", "-a", "--max-args", "--max-procs", "--delimiter"],
        0,
    ),
    wrapper("parallel", &["-j", "--jobs"], 0),
];

const SHELLS: &[&str] = &["sh", "bash", "dash", "zsh", "ksh", "ash", "mksh", "fish", "rbash"];

pub fn of_script(text: &str, start: &Start<'_>) -> Invocations {
    let mut out = Invocations::default();
    read(text, start, false, &mut out);
    out
}

fn read(text: &str, start: &Start<'_>, elevated: bool, out: &mut Invocations) {
    let script = shell::parse(text, start);
    out.too_complex |= script.too_complex;
    out.fork_bomb |= has_fork_bomb(&script.commands);
    for (i, command) in script.commands.iter().enumerate() {
        if out.all.len() >= MAX_COMMANDS {
            out.too_complex = true;
            return;
        }
        let previous =
            i.checked_sub(1).map(|p| &script.commands[p]).filter(|p| p.pipeline == command.pipeline);
        let stdin = command.stdin.clone().or_else(|| previous.and_then(constant_output));
        let context = Context { command, start, stdin };
        context.unfold(&command.words, elevated, start.depth, out);
        if command.words.is_empty() {
            context.push("", &[], elevated, out);
        }
    }
}

/// A function that calls itself twice in one pipeline, or in the background.
fn has_fork_bomb(commands: &[Command]) -> bool {
    let calls_itself = |c: &Command| {
        c.function.is_some() && c.words.first().is_some_and(|w| Some(&w.text) == c.function.as_ref())
    };
    commands.iter().enumerate().filter(|(_, c)| calls_itself(c)).any(|(i, c)| {
        c.background || commands[i + 1..].iter().any(|d| d.pipeline == c.pipeline && calls_itself(d))
    })
}

struct Context<'a> {
    command: &'a Command,
    start: &'a Start<'a>,
    /// What it reads, where that is known.
    stdin: Option<String>,
}

impl Context<'_> {
    fn push(&self, name: &str, args: &[Word], elevated: bool, out: &mut Invocations) {
        out.all.push(Invocation {
            name: name.to_string(),
            args: args.to_vec(),
            redirects: self.command.redirects.clone(),
            cwd: self.command.cwd.clone(),
            elevated,
        });
    }

    fn script(&self, text: &str, elevated: bool, depth: usize, out: &mut Invocations) {
        let start = Start { cwd: self.command.cwd.as_deref(), home: self.start.home, depth: depth + 1 };
        read(text, &start, elevated, out);
    }

    fn unfold(&self, words: &[Word], elevated: bool, depth: usize, out: &mut Invocations) {
        if depth > MAX_DEPTH {
            out.too_complex = true;
            return;
        }
        let Some((first, args)) = words.split_first() else { return };
        let name = first.text.rsplit('/').next().unwrap_or_default();
        self.push(name, args, elevated, out);
        let elevated = elevated || matches!(name, "sudo" | "doas" | "su" | "runuser" | "pkexec");
        if SHELLS.contains(&name) {
            return self.shell(args, elevated, depth, out);
        }
        match name {
            "eval" => self.script(&join(args), elevated, depth, out),
            "su" | "runuser" | "script" => {
                if let Some(text) = value_of(args, "-c") {
                    self.script(&text, elevated, depth, out);
                }
            }
            "trap" => {
                if let Some(word) = args.first() {
                    self.script(&word.text, elevated, depth, out);
                }
            }
            "source" | "." => {
                if let (Some(stdin), Some("/dev/stdin")) =
                    (&self.stdin, args.first().map(|w| w.text.as_str()))
                {
                    self.script(stdin, elevated, depth, out);
                }
            }
            "find" => self.find(args, elevated, depth, out),
            "command" if args.first().is_some_and(|w| matches!(w.text.as_str(), "-v" | "-V")) => {}
            _ => {
                let Some(wrapper) = WRAPPERS.iter().find(|w| w.name == name) else { return };
                if let Some(text) = value_of(args, "-S").filter(|_| name == "env") {
                    return self.script(&text, elevated, depth, out);
                }
                if let Some(text) = value_of(args, "-c").filter(|_| name == "flock") {
                    return self.script(&text, elevated, depth, out);
                }
                let mut inner = wrapped(wrapper, args).to_vec();
                if matches!(name, "watch") || (name == "parallel" && inner.len() == 1) {
                    return self.script(&join(&inner), elevated, depth, out);
                }
                if let (true, Some(stdin)) = (matches!(name, "xargs" | "parallel"), &self.stdin) {
                    inner.extend(
                        stdin.split_whitespace().map(|t| Word { text: t.to_string(), ..Word::default() }),
                    );
                }
                self.unfold(&inner, elevated, depth + 1, out);
            }
        }
    }

    /// `sh -c TEXT`, or a shell that reads its script from what is known to be piped into it.
    fn shell(&self, args: &[Word], elevated: bool, depth: usize, out: &mut Invocations) {
        let mut rest = args;
        while let Some((word, after)) = rest.split_first() {
            let text = word.text.as_str();
            rest = after;
            if !text.starts_with(['-', '+']) {
                // A script file: its content is not known here.
                return;
            }
            if text.starts_with('-') && !text.starts_with("--") && text.contains('c') {
                let script = rest.iter().find(|w| !w.text.starts_with('-'));
                return script.into_iter().for_each(|w| self.script(&w.text, elevated, depth, out));
            }
            if matches!(text, "-o" | "+o" | "-O" | "+O" | "--rcfile" | "--init-file") {
                rest = rest.get(1..).unwrap_or_default();
            }
        }
        if let Some(stdin) = &self.stdin {
            self.script(stdin, elevated, depth, out);
        }
    }

    /// `-exec` runs a command on everything below the start; for judging, on the start itself.
    fn find(&self, args: &[Word], elevated: bool, depth: usize, out: &mut Invocations) {
        let starts: Vec<Word> =
            args.iter().take_while(|w| !w.text.starts_with(['-', '(', '!'])).cloned().collect();
        let mut rest = args;
        while let Some(at) =
            rest.iter().position(|w| matches!(w.text.as_str(), "-exec" | "-execdir" | "-ok" | "-okdir"))
        {
            let inner = &rest[at + 1..];
            let end = inner.iter().position(|w| matches!(w.text.as_str(), ";" | "+")).unwrap_or(inner.len());
            let mut words = Vec::new();
            for word in &inner[..end] {
                match word.text.as_str() {
                    "{}" => words.extend(starts.iter().cloned()),
                    _ => words.push(word.clone()),
                }
            }
            self.unfold(&words, elevated, depth + 1, out);
            rest = &inner[end..];
        }
    }
}

fn join(words: &[Word]) -> String {
    words.iter().map(|w| w.text.as_str()).collect::<Vec<_>>().join(" ")
}

/// The word after an option (`-c`, also at the end of a bundle such as `-lc`).
fn value_of(args: &[Word], option: &str) -> Option<String> {
    let letter = option.strip_prefix('-')?;
    let at = args.iter().position(|w| {
        w.text == option || (w.text.starts_with('-') && !w.text.starts_with("--") && w.text.ends_with(letter))
    })?;
    args.get(at + 1).map(|w| w.text.clone())
}

/// The words after a wrapper's own options, assignments and positionals.
fn wrapped<'a>(wrapper: &Wrapper, args: &'a [Word]) -> &'a [Word] {
    let mut rest = args;
    let mut positionals = wrapper.positionals;
    while let Some((word, after)) = rest.split_first() {
        let text = word.text.as_str();
        if text == "--" {
            rest = after;
            break;
        }
        let assigns = matches!(wrapper.name, "env" | "sudo" | "doas") && text.contains('=');
        if text.starts_with('-') && text.len() > 1 || assigns {
            rest = after;
            if wrapper.with_value.contains(&text) {
                rest = rest.get(1..).unwrap_or_default();
            }
        } else if positionals > 0 {
            positionals -= 1;
            rest = after;
        } else {
            break;
        }
    }
    rest
}

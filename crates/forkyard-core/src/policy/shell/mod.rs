//! Every simple command that a shell script could run, found without running it.
//!
//! Total and bounded: any text gives an answer, and a script that is larger or nested deeper than the bounds is reported as
//! [`Script::too_complex`] rather than half read. It reads what bash reads (quoting, substitutions, lists, pipelines,
//! subshells, functions, compound commands, redirects, here-documents) and folds what is constant: variables that were
//! assigned a literal, `~`, `$HOME`, braces, `$(echo …)`. What can't be known stays [`UNKNOWN`] in the word's text.

mod words;

use std::collections::BTreeMap;

/// Stands for the part of a word that is only known at run time. No shell word can contain NUL.
pub const UNKNOWN: char = '\0';

/// Longest script that is judged; a here-document that writes a large file fits.
pub const MAX_SCRIPT_CHARS: usize = 1 << 20;
/// Substitutions within substitutions; people write two or three.
pub const MAX_DEPTH: usize = 24;
/// Simple commands of one script, those inside of `bash -c` and the like included.
pub const MAX_COMMANDS: usize = 4096;
/// `$…` of one script. What looks like arithmetic and is not is read twice, so nesting it costs more than its length.
pub const MAX_EXPANSIONS: usize = 1 << 16;
/// Variables whose value is followed.
const MAX_VARIABLES: usize = 256;
/// Words that braces or lists may unfold to, per word as written.
pub const MAX_EXPANSION: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Word {
    pub text: String,
    /// Some part of it was quoted: it can't be a reserved word.
    pub quoted: bool,
    /// It has an unquoted `*`, `?` or `[`.
    pub glob: bool,
}

impl Word {
    pub fn is_known(&self) -> bool {
        !self.text.contains(UNKNOWN)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    pub writes: bool,
    pub target: Word,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Command {
    pub words: Vec<Word>,
    pub redirects: Vec<Redirect>,
    /// What a here-document or here-string gives it to read.
    pub stdin: Option<String>,
    /// The working directory, where it is known.
    pub cwd: Option<String>,
    /// The function whose body it stands in.
    pub function: Option<String>,
    /// Commands of one pipeline share the number.
    pub pipeline: usize,
    pub background: bool,
}

#[derive(Debug, Default)]
pub struct Script {
    pub commands: Vec<Command>,
    pub too_complex: bool,
}

/// What a script starts with.
#[derive(Debug, Clone)]
pub struct Start<'a> {
    pub cwd: Option<&'a str>,
    pub home: &'a str,
    pub depth: usize,
}

pub fn parse(text: &str, start: &Start<'_>) -> Script {
    let mut vars = BTreeMap::new();
    vars.insert("HOME".to_string(), vec![start.home.to_string()]);
    vars.insert("IFS".to_string(), vec![" ".to_string()]);
    if let Some(cwd) = start.cwd {
        vars.insert("PWD".to_string(), vec![cwd.to_string()]);
    }
    let mut parser = Parser {
        src: text.chars().take(MAX_SCRIPT_CHARS + 1).collect(),
        pos: 0,
        depth: start.depth,
        home: start.home.to_string(),
        vars,
        cwd: start.cwd.map(str::to_string),
        functions: Vec::new(),
        pending: Vec::new(),
        next_pipeline: 0,
        expansions: 0,
        script: Script::default(),
    };
    if parser.src.len() > MAX_SCRIPT_CHARS || start.depth > MAX_DEPTH {
        parser.script.too_complex = true;
    } else {
        parser.list(None);
    }
    parser.script
}

/// A character of a word under construction, and whether quoting made it plain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ch {
    pub c: char,
    pub quoted: bool,
}

struct HereDoc {
    delimiter: String,
    literal: bool,
    strip_tabs: bool,
    command: Option<usize>,
}

/// The simple command being read.
#[derive(Default)]
struct Current {
    words: Vec<Word>,
    redirects: Vec<Redirect>,
    stdin: Option<String>,
    heredocs: Vec<HereDoc>,
}

struct Parser {
    src: Vec<char>,
    pos: usize,
    depth: usize,
    home: String,
    /// Values that are known; more than one where a loop goes over them.
    vars: BTreeMap<String, Vec<String>>,
    cwd: Option<String>,
    /// One per open `{`; the function's name where it is a function's body.
    functions: Vec<Option<String>>,
    pending: Vec<HereDoc>,
    next_pipeline: usize,
    expansions: usize,
    script: Script,
}

impl Parser {
    fn peek(&self) -> Option<char> {
        self.src.get(self.pos).copied()
    }
    fn peek_at(&self, ahead: usize) -> Option<char> {
        self.src.get(self.pos + ahead).copied()
    }
    fn looking_at(&self, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.peek_at(i) == Some(c))
    }
    fn take(&mut self, text: &str) -> bool {
        let found = self.looking_at(text);
        if found {
            self.pos += text.chars().count();
        }
        found
    }
    fn skip_blanks(&mut self) {
        loop {
            match self.peek() {
                Some(' ' | '\t' | '\r') => self.pos += 1,
                Some('\\') if self.peek_at(1) == Some('\n') => self.pos += 2,
                _ => return,
            }
        }
    }

    /// Reads commands up to `end` (which is consumed) or the end of the text.
    fn list(&mut self, end: Option<char>) {
        if self.depth > MAX_DEPTH {
            return self.give_up();
        }
        let mut current = Current::default();
        let mut cases = 0_usize;
        let mut list_start = self.script.commands.len();
        let mut pipeline = self.new_pipeline();
        let mut function: Option<String> = None;
        while !self.script.too_complex {
            self.skip_blanks();
            let Some(c) = self.peek() else { break };
            if Some(c) == end {
                self.pos += 1;
                self.finish(&mut current, pipeline);
                return;
            }
            match c {
                '\n' => {
                    self.pos += 1;
                    self.finish(&mut current, pipeline);
                    self.read_heredocs();
                    list_start = self.script.commands.len();
                    pipeline = self.new_pipeline();
                }
                '#' => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.pos += 1;
                    }
                }
                ';' => {
                    self.pos += 1;
                    self.finish(&mut current, pipeline);
                    list_start = self.script.commands.len();
                    pipeline = self.new_pipeline();
                    let branch_ends = self.peek() == Some(';') || self.peek() == Some('&');
                    while matches!(self.peek(), Some(';' | '&')) {
                        self.pos += 1;
                    }
                    if branch_ends && cases > 0 {
                        self.case_pattern(&mut cases);
                    }
                }
                '&' if self.looking_at("&>") => {
                    self.pos += 2;
                    self.take(">");
                    self.redirect_target(&mut current, true);
                }
                '&' => {
                    self.pos += 1;
                    self.finish(&mut current, pipeline);
                    if !self.take("&") {
                        for command in &mut self.script.commands[list_start..] {
                            command.background = true;
                        }
                        list_start = self.script.commands.len();
                    }
                    pipeline = self.new_pipeline();
                }
                '|' => {
                    self.pos += 1;
                    self.finish(&mut current, pipeline);
                    if self.take("|") {
                        pipeline = self.new_pipeline();
                    } else {
                        self.take("&");
                    }
                }
                '(' => {
                    let at = self.pos;
                    self.pos += 1;
                    self.skip_blanks();
                    if current.words.len() == 1 && self.take(")") {
                        function = Some(std::mem::take(&mut current).words.remove(0).text);
                    } else if current.words.is_empty() && self.arithmetic_after(at) {
                    } else {
                        self.finish(&mut current, pipeline);
                        self.functions.push(function.take());
                        let (vars, cwd) = (self.vars.clone(), self.cwd.clone());
                        self.nested(')');
                        (self.vars, self.cwd) = (vars, cwd);
                        self.functions.pop();
                    }
                }
                ')' => {
                    // Not ours to close: a stray one, which bash would refuse.
                    self.pos += 1;
                    self.finish(&mut current, pipeline);
                }
                '<' | '>' if !self.is_process_substitution() => self.redirect(&mut current),
                '0'..='9' if self.is_numbered_redirect() => {
                    while self.peek().is_some_and(|c| c.is_ascii_digit()) {
                        self.pos += 1;
                    }
                    self.redirect(&mut current);
                }
                _ => {
                    let words = self.word();
                    let at_start = current.words.is_empty();
                    for word in words {
                        if at_start && current.words.is_empty() && !word.quoted {
                            match word.text.as_str() {
                                "if" | "then" | "else" | "elif" | "fi" | "while" | "until" | "do"
                                | "done" | "!" | "coproc" => continue,
                                "{" => {
                                    self.functions.push(function.take());
                                    continue;
                                }
                                "}" => {
                                    self.functions.pop();
                                    continue;
                                }
                                "for" | "select" => {
                                    self.for_clause();
                                    continue;
                                }
                                "case" => {
                                    self.skip_blanks();
                                    self.word();
                                    self.skip_space_and_newlines();
                                    self.word();
                                    cases += 1;
                                    self.case_pattern(&mut cases);
                                    continue;
                                }
                                "esac" => {
                                    cases = cases.saturating_sub(1);
                                    continue;
                                }
                                "function" => {
                                    self.skip_blanks();
                                    function = self.word().into_iter().next().map(|w| w.text);
                                    self.skip_blanks();
                                    if self.take("(") {
                                        self.skip_blanks();
                                        self.take(")");
                                    }
                                    continue;
                                }
                                "[[" => {
                                    self.condition();
                                    continue;
                                }
                                _ => {}
                            }
                        }
                        current.words.push(word);
                    }
                }
            }
        }
        self.finish(&mut current, pipeline);
        self.read_heredocs();
    }

    /// Over a bound: reads nothing more.
    fn give_up(&mut self) {
        self.script.too_complex = true;
        self.pos = self.src.len();
    }

    fn new_pipeline(&mut self) -> usize {
        self.next_pipeline += 1;
        self.next_pipeline
    }

    /// The list inside of `$(`, `(` or `<(`, whose opening is consumed.
    fn nested(&mut self, end: char) {
        self.depth += 1;
        self.list(Some(end));
        self.depth -= 1;
    }

    /// Another text as part of this script: backticks, an unquoted here-document.
    fn within(&mut self, text: Vec<char>, read: impl FnOnce(&mut Parser)) {
        let src = std::mem::replace(&mut self.src, text);
        let pos = std::mem::take(&mut self.pos);
        let pending = std::mem::take(&mut self.pending);
        self.depth += 1;
        read(self);
        self.depth -= 1;
        self.src = src;
        self.pos = pos;
        self.pending = pending;
    }

    fn skip_space_and_newlines(&mut self) {
        loop {
            self.skip_blanks();
            if self.peek() != Some('\n') {
                return;
            }
            self.pos += 1;
        }
    }

    /// `for NAME in WORDS`: the name is bound to all the words.
    fn for_clause(&mut self) {
        self.skip_blanks();
        if self.take("((") {
            self.arithmetic();
            return;
        }
        let Some(name) = self.word().into_iter().next() else { return };
        self.skip_space_and_newlines();
        let at = self.pos;
        if self.word().first().is_none_or(|w| w.text != "in") {
            self.pos = at;
            return;
        }
        let mut values = Vec::new();
        loop {
            self.skip_blanks();
            match self.peek() {
                None | Some('\n' | ';' | '&' | '|' | ')' | '(' | '<' | '>') => break,
                Some(_) => values.extend(self.word().into_iter().map(|w| w.text)),
            }
        }
        values.truncate(MAX_EXPANSION);
        self.assign(name.text, values);
    }

    /// `PATTERN | PATTERN )` of a case, or its `esac`.
    fn case_pattern(&mut self, cases: &mut usize) {
        loop {
            self.skip_space_and_newlines();
            match self.peek() {
                None => return,
                Some(')') => {
                    self.pos += 1;
                    return;
                }
                Some('(' | '|' | ';' | '&' | '<' | '>') => self.pos += 1,
                Some('#') => {
                    while self.peek().is_some_and(|c| c != '\n') {
                        self.pos += 1;
                    }
                }
                Some(_) => {
                    let at = self.pos;
                    let words = self.word();
                    if words.len() == 1 && words[0].text == "esac" && !words[0].quoted {
                        *cases = cases.saturating_sub(1);
                        return;
                    }
                    if self.pos == at {
                        self.pos += 1;
                    }
                }
            }
        }
    }

    /// Inside of `[[ … ]]` nothing is a command but substitutions.
    fn condition(&mut self) {
        loop {
            self.skip_space_and_newlines();
            match self.peek() {
                None => return,
                Some('(' | ')' | '<' | '>' | '&' | '|' | ';') => self.pos += 1,
                Some(_) => {
                    let at = self.pos;
                    if self.word().first().is_some_and(|w| w.text == "]]") {
                        return;
                    }
                    if self.pos == at {
                        self.pos += 1;
                    }
                }
            }
        }
    }

    /// After `((` or `$((`: to the matching `))`; only substitutions inside run anything. False, and nothing consumed, if it
    /// closes otherwise: then they are subshells.
    pub(super) fn arithmetic(&mut self) -> bool {
        let start = self.pos;
        let mut open = 0_usize;
        let mut sink = Vec::new();
        while let Some(c) = self.peek() {
            match c {
                '(' => {
                    open += 1;
                    self.pos += 1;
                }
                ')' if open == 0 => {
                    if self.take("))") {
                        return true;
                    }
                    break;
                }
                ')' => {
                    open -= 1;
                    self.pos += 1;
                }
                '$' => self.dollar(true, &mut sink),
                '`' => self.backticks(true, &mut sink),
                _ => self.pos += 1,
            }
        }
        self.pos = start;
        false
    }

    fn arithmetic_after(&mut self, open: usize) -> bool {
        let here = self.pos;
        let is_arithmetic = self.pos == open + 1 && self.take("(") && self.arithmetic();
        if !is_arithmetic {
            self.pos = here;
        }
        is_arithmetic
    }

    fn is_process_substitution(&self) -> bool {
        self.peek_at(1) == Some('(')
    }

    fn is_numbered_redirect(&self) -> bool {
        let digits =
            (0..).take_while(|i| self.peek_at(*i).is_some_and(|c| c.is_ascii_digit())).take(4).count();
        matches!(self.peek_at(digits), Some('<' | '>')) && self.peek_at(digits + 1) != Some('(')
    }

    fn redirect(&mut self, current: &mut Current) {
        if self.take("<<<") {
            self.skip_blanks();
            let text: Vec<_> = self.word().into_iter().map(|w| w.text).collect();
            current.stdin = Some(text.join(" "));
        } else if self.take("<<") {
            let strip_tabs = self.take("-");
            self.skip_blanks();
            if let Some(word) = self.word().into_iter().next() {
                current.heredocs.push(HereDoc {
                    delimiter: word.text,
                    literal: word.quoted,
                    strip_tabs,
                    command: None,
                });
            }
        } else if self.take("<>") {
            self.redirect_target(current, true);
        } else if self.take("<&") || self.take("<") {
            self.redirect_target(current, false);
        } else {
            // `>`, `>>`, `>|`, `>&`; a bare number or `-` after `>&` only duplicates or closes.
            self.pos += 1;
            let duplicates = self.peek() == Some('&');
            if matches!(self.peek(), Some('>' | '|' | '&')) {
                self.pos += 1;
            }
            let before = current.redirects.len();
            self.redirect_target(current, true);
            if duplicates {
                let added = current.redirects.split_off(before);
                let is_file = |r: &Redirect| !r.target.text.chars().all(|c| c.is_ascii_digit() || c == '-');
                current.redirects.extend(added.into_iter().filter(is_file));
            }
        }
    }

    fn redirect_target(&mut self, current: &mut Current, writes: bool) {
        self.skip_blanks();
        for target in self.word() {
            current.redirects.push(Redirect { writes, target });
        }
    }

    fn read_heredocs(&mut self) {
        for doc in std::mem::take(&mut self.pending) {
            let mut body = Vec::new();
            while self.pos < self.src.len() {
                let end = self.src[self.pos..]
                    .iter()
                    .position(|c| *c == '\n')
                    .map_or(self.src.len(), |n| self.pos + n);
                let mut line = &self.src[self.pos..end];
                if doc.strip_tabs {
                    let tabs = line.iter().take_while(|c| **c == '\t').count();
                    line = &line[tabs..];
                }
                let is_end = line.iter().copied().eq(doc.delimiter.chars());
                if !is_end {
                    body.extend_from_slice(line);
                    body.push('\n');
                }
                self.pos = (end + 1).min(self.src.len());
                if is_end {
                    break;
                }
            }
            let text = if doc.literal {
                body.iter().collect()
            } else {
                let mut chars = Vec::new();
                self.within(body, |p| p.double_quoted(None, &mut chars));
                chars.iter().map(|ch: &Ch| ch.c).collect()
            };
            if let Some(command) = doc.command.and_then(|i| self.script.commands.get_mut(i)) {
                command.stdin = Some(text);
            }
        }
    }

    /// The command is complete: its assignments take effect, and it joins the script.
    fn finish(&mut self, current: &mut Current, pipeline: usize) {
        let Current { mut words, redirects, stdin, heredocs } = std::mem::take(current);
        let assignments = words.iter().take_while(|w| assignment(w).is_some()).count();
        let prefix: Vec<Word> = words.drain(..assignments).collect();
        if words.is_empty() {
            for word in &prefix {
                if let Some((name, value)) = assignment(word) {
                    self.assign(name.to_string(), vec![value.to_string()]);
                }
            }
        }
        if words.is_empty() && redirects.is_empty() && heredocs.is_empty() {
            return;
        }
        if self.script.commands.len() >= MAX_COMMANDS {
            self.script.too_complex = true;
            return;
        }
        let index = self.script.commands.len();
        self.pending.extend(heredocs.into_iter().map(|doc| HereDoc { command: Some(index), ..doc }));
        let command = Command {
            words,
            redirects,
            stdin,
            cwd: self.cwd.clone(),
            function: self.functions.iter().rev().flatten().next().cloned(),
            pipeline,
            background: false,
        };
        self.effects_of(&command);
        self.script.commands.push(command);
    }

    /// Builtins that change what later words mean.
    fn effects_of(&mut self, command: &Command) {
        let Some((name, args)) = command.words.split_first() else { return };
        match name.text.as_str() {
            "export" | "declare" | "local" | "readonly" | "typeset" => {
                for word in args {
                    if let Some((name, value)) = assignment(word) {
                        self.assign(name.to_string(), vec![value.to_string()]);
                    }
                }
            }
            "cd" | "pushd" => {
                let target = args.iter().find(|w| !w.text.starts_with('-') || w.text == "-");
                self.cwd = match target {
                    None => Some(self.home.clone()),
                    Some(w) if w.is_known() && !w.glob && w.text != "-" => super::paths::resolve(
                        self.cwd.as_deref().unwrap_or("/workspace"),
                        &w.text,
                        &self.home,
                    ),
                    Some(_) => None,
                };
                match &self.cwd {
                    Some(cwd) => self.vars.insert("PWD".to_string(), vec![cwd.clone()]),
                    None => self.vars.remove("PWD"),
                };
            }
            "popd" => self.cwd = None,
            "unset" | "read" => {
                for word in args {
                    self.vars.remove(&word.text);
                }
            }
            _ => {}
        }
    }

    fn assign(&mut self, name: String, values: Vec<String>) {
        if values.iter().any(|v| v.contains(UNKNOWN)) {
            self.vars.remove(&name);
        } else if self.vars.len() < MAX_VARIABLES {
            self.vars.insert(name, values);
        }
    }
}

/// `NAME=VALUE` with a name that the shell would take.
fn assignment(word: &Word) -> Option<(&str, &str)> {
    let (name, value) = word.text.split_once('=')?;
    let name = name.strip_suffix('+').unwrap_or(name);
    let mut chars = name.chars();
    let ok = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_');
    ok.then_some((name, value))
}

/// What `echo`, `printf` and a look-up of a program's path print, where that is known.
pub fn constant_output(command: &Command) -> Option<String> {
    let (name, args) = command.words.split_first()?;
    if !command.words.iter().all(|w| w.is_known() && !w.glob) {
        return None;
    }
    let args: Vec<&str> = args.iter().map(|w| w.text.as_str()).collect();
    match (name.text.as_str(), args.as_slice()) {
        ("echo", args) => {
            let skip = args.iter().take_while(|a| matches!(**a, "-n" | "-e" | "-en" | "-ne")).count();
            Some(args[skip..].join(" "))
        }
        ("printf", ["%s" | "%s\\n", args @ ..]) => Some(args.join(" ")),
        ("printf", [text]) if !text.contains('%') => Some(text.replace("\\n", "\n")),
        ("which" | "command", [.., program]) => Some((*program).to_string()),
        ("pwd", []) => command.cwd.clone(),
        ("cat", []) => command.stdin.clone(),
        _ => None,
    }
}

//! What only those who will read it can judge in a specification: patterns, tools, templates, allow lists. Whoever submits a
//! run passes here, so a mistake costs nothing.

use forkyard_agent::{check_template, tool_names};
use forkyard_core::policy::is_about;
use forkyard_core::spec::{FieldError, ForkSpec, InvalidSpec, RunSpec};
use forkyard_sandbox::egress::policy::Rule;
use globset::Glob;

/// Of a value, in a message.
const MAX_SHOWN_CHARS: usize = 120;

pub(crate) fn run(spec: &RunSpec) -> Result<(), InvalidSpec> {
    let mut wrong = vec![];
    patterns("protect", &spec.protect, &mut wrong);
    captures(&spec.forks, &mut wrong);
    let agent = &spec.agent;
    for (field, tools) in
        [("agent.allowed_tools", &agent.allowed_tools), ("agent.disallowed_tools", &agent.disallowed_tools)]
    {
        for tool in tools.iter().filter(|t| !names_a_tool(t)) {
            let names: Vec<&str> = tool_names().collect();
            let fix = format!("name one of {}, or Bash(git *) for some of its calls", names.join(", "));
            wrong.push(error(field, tool, "names no tool", &fix));
        }
    }
    if let Some(template) = &agent.prompt_template
        && let Err((problem, fix)) = check_template(template)
    {
        wrong.push(error("agent.prompt_template", template, &problem, &fix));
    }
    for entry in &spec.sandbox.network.allow {
        if let Err(e) = Rule::parse(entry) {
            let fix = e.hint.unwrap_or_else(|| "write a host".into());
            wrong.push(error("sandbox.network.allow", entry, "is no host to allow", &fix));
        }
    }
    done(wrong)
}

/// The same for forks that are added to a live run.
pub(crate) fn forks(added: &[ForkSpec]) -> Result<(), InvalidSpec> {
    let mut wrong = vec![];
    captures(added, &mut wrong);
    done(wrong)
}

fn done(wrong: Vec<FieldError>) -> Result<(), InvalidSpec> {
    if wrong.is_empty() { Ok(()) } else { Err(InvalidSpec(wrong)) }
}

fn captures(forks: &[ForkSpec], wrong: &mut Vec<FieldError>) {
    for (i, fork) in forks.iter().enumerate() {
        patterns(&format!("forks[{i}].capture"), &fork.capture, wrong);
    }
}

fn patterns(field: &str, patterns: &[String], wrong: &mut Vec<FieldError>) {
    for pattern in patterns {
        if let Err(e) = Glob::new(pattern) {
            let problem = format!("is no pattern of files ({})", e.kind());
            wrong.push(error(field, pattern, &problem, "write one like tests/** or *.rs; [[] is a bracket"));
        }
    }
}

fn names_a_tool(entry: &str) -> bool {
    tool_names().any(|tool| is_about(entry, tool))
}

fn error(field: &str, value: &str, problem: &str, fix: &str) -> FieldError {
    let value = value.lines().next().unwrap_or_default().chars().take(MAX_SHOWN_CHARS).collect();
    FieldError { field: field.into(), value, problem: problem.into(), fix: fix.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(change: impl FnOnce(&mut RunSpec)) -> Vec<String> {
        let mut spec = RunSpec::new("/r", "do it", "sonnet", 2);
        change(&mut spec);
        run(&spec).err().map(|e| e.0.into_iter().map(|f| f.field).collect()).unwrap_or_default()
    }

    #[test]
    fn what_nobody_could_use_is_named_before_it_costs() {
        type Change = fn(&mut RunSpec);
        let cases: [(&str, Change); 6] = [
            ("protect", |s| s.protect = vec!["[".into()]),
            ("forks[1].capture", |s| s.forks[1].capture = vec!["*.log".into(), "a{b".into()]),
            ("agent.allowed_tools", |s| s.agent.allowed_tools = vec!["Read".into(), "Foo".into()]),
            ("agent.disallowed_tools", |s| s.agent.disallowed_tools = vec!["Nope(x)".into()]),
            ("agent.prompt_template", |s| s.agent.prompt_template = Some("{{ nope }}".into())),
            ("sandbox.network.allow", |s| s.sandbox.network.allow = vec!["http://foo/".into()]),
        ];
        for (field, change) in cases {
            assert_eq!(fields(change), [field]);
        }
        assert_eq!(
            fields(|s| {
                s.protect = vec!["tests/**".into(), "[ab].rs".into()];
                s.agent.allowed_tools = vec!["Bash(git *)".into(), "R*".into()];
                s.agent.disallowed_tools = vec!["*".into()];
                s.agent.prompt_template = Some("In {{workspace}} of {{ repo }}".into());
                s.sandbox.network.allow = vec!["*.example.com".into(), "10.0.0.0/24:443:ro".into()];
            }),
            Vec::<String>::new()
        );
        assert!(forks(&[ForkSpec { capture: vec!["[".into()], ..ForkSpec::default() }]).is_err());
    }
}

//! docs/configuration.md, from the table.

use super::table::{Reads, Setting, TABLE};

pub fn markdown() -> String {
    let mut out = String::from(
        "# Configuration\n\n\
         <!-- Generated from the settings table: change it there and run `cargo xtask codegen`. -->\n\n\
         A setting comes from, the first that has it: a flag; a variable of the environment; the project's own\n\
         `forkyard.toml`; `config.toml` in Forkyard's home; its default. `forkyard config` shows every value and where it\n\
         came from. Unknown keys are errors.\n\n\
         Forkyard's home is `$FORKYARD_HOME`, else `~/.forkyard` if it exists, else `$XDG_DATA_HOME/forkyard`, else\n\
         `~/.local/share/forkyard`.\n\n\
         A project's file comes with a repository and is not trusted: it may set what is marked *project* below, which acts\n\
         inside the sandbox alone. Everything else in it is refused until you run `forkyard trust`, which trusts exactly\n\
         that content.\n\n\
         Durations are written like `90s`, `15m`, `2h` or `1h30m` (a bare number is seconds), sizes like `512MiB` or `4GiB`\n\
         (a bare number is bytes), money like `$5` or `0.50`. Lists are arrays in a file and separated by commas elsewhere.\n",
    );
    let mut section = "-";
    for s in TABLE {
        let of = s.key.split_once('.').map_or("", |(table, _)| table);
        if of != section {
            section = of;
            let title = if of.is_empty() { "Top level".to_string() } else { format!("`[{of}]`") };
            out.push_str(&format!("\n## {title}\n"));
        }
        out.push_str(&entry(s));
    }
    out.push_str(TABLES);
    out
}

const TABLES: &str = "
## Tables

These are read from `config.toml`, or from a project's file that you trust.

### `[secrets.NAME]`

A header that is put into requests on the host, for the hosts it is bound to; it never enters a sandbox. A run asks for it by name.

```toml
[secrets.packages]
header = \"Authorization\"
env = \"PACKAGES_TOKEN\"          # or value = \"…\"
hosts = [\"packages.example.com\"]
methods = [\"GET\"]               # empty: all
path_prefixes = [\"/npm/\"]       # empty: all
```

### `[prices.MODEL]`

Dollars per million tokens, over the built-in list: `input`, `output`, `cache_write_5m`, `cache_write_1h`, `cache_read`; `aliases`;
`context_tokens`, the most that the model reads (200000 if not given); `image_tokens`, the most that one image counts for.

### `[policy]`

What tool calls are judged by: `permission_mode`, `allowed_tools`, `disallowed_tools`, `allowed_paths`, `blocked_paths`,
`secret_paths`, `strict_paths`, `blocked_commands`, `block_fork_bombs`, `max_file_bytes`, `max_calls_per_turn`.

### `[[hooks]]`

A command that is run on the host before or after tool calls: JSON on its standard input, a decision by its exit status or its
output. Several are asked in their order.

```toml
[[hooks]]
event = \"PreToolUse\"           # or \"PostToolUse\"
matcher = \"Bash|Write\"         # names with | and *; empty: all tools
command = \"/home/me/bin/judge\"
timeout_ms = 60000
```
";

fn entry(s: &Setting) -> String {
    let mut facts = vec![s.kind.replace('|', "or")];
    if let Some((min, max)) = s.range {
        facts.push(format!("from {min} to {max}"));
    }
    facts.push(match s.default {
        Some("") => "default: empty".into(),
        Some(d) => format!("default: `{d}`"),
        None => "unset by default".into(),
    });
    for v in s.env {
        facts.push(match v.reads {
            Reads::AsIs => format!("`${}`", v.name),
            Reads::InUnit(unit) => format!("`${}` (in {unit})", v.name),
            Reads::Negated => format!("`${}` (true turns it off)", v.name),
        });
    }
    facts.extend(s.flag.map(|f| format!("`{f}`")));
    if s.project {
        facts.push("*project*".into());
    }
    format!("\n### `{}`\n\n{}\n\n{}\n", s.key, s.doc.trim(), facts.join(" · "))
}

//! Servers that `baton serve` drives by itself, from the command line.

use std::path::Path;
use std::sync::Arc;

use baton_membership::{
    Directory, DnsSource, FileSource, KubernetesSource, ListSource, Member, MemberRole, Source,
};

use crate::cli::node::NodeArgs;
use crate::node::RemoteNode;
use crate::up::Making;

/// Options of `baton node` that a server may have; a member's label of such a name sets it.
const OPTIONS: [&str; 18] = [
    "engine",
    "model",
    "profile",
    "block-tokens",
    "pass-tokens",
    "url",
    "handoff",
    "bootstrap-url",
    "bootstrap-host",
    "bootstrap-port",
    "events",
    "events-replay",
    "engine-key",
    "served-model",
    "dp-rank",
    "capacity-tokens",
    "max-model-tokens",
    "net-bytes-per-s",
];

/// Which servers there are.
#[derive(clap::Args)]
#[command(next_help_heading = "Servers (driven from here, without a `baton node` for each)")]
pub struct ServersArgs {
    /// vLLM, SGLang or other servers to stand in front of: http://HOST:PORT,... (ROLE=http://... where that is not both), a file of members (.toml, .json),
    /// dns:HOST:PORT, or kubernetes:SERVICE within a pod (and :PORT, by its name); followed while serving
    #[arg(long, value_name = "SOURCE")]
    servers: Option<String>,
    /// Options of `baton node` for each of them, like "--engine sglang"; a member's own labels count more
    #[arg(
        long,
        value_name = "OPTIONS",
        requires = "servers",
        allow_hyphen_values = true,
        default_value = ""
    )]
    each: String,
}

/// What servers have where nothing else is said.
pub struct Defaults {
    /// Folder of the tokenizer, as nodes are told it.
    pub model: Option<String>,
    /// Tokens in a block.
    pub block_tokens: u32,
}

#[derive(clap::Parser)]
#[command(no_binary_name = true, disable_help_flag = true, args_override_self = true)]
struct Words {
    #[command(flatten)]
    node: NodeArgs,
}

impl ServersArgs {
    /// Whether there are any.
    pub const fn any(&self) -> bool {
        self.servers.is_some()
    }

    /// The list, which is followed from now on, and how to make a node of each on it. Must be called in a runtime.
    ///
    /// # Errors
    /// In words: the source or an option cannot work.
    pub fn start(&self, defaults: Defaults) -> Result<Option<(Directory, Making)>, String> {
        let Some(text) = &self.servers else { return Ok(None) };
        let each: Vec<String> = self.each.split_whitespace().map(str::to_owned).collect();
        let role = role_of(&each)?;
        let source = source(text, role)?;
        let example = Member::new("example", role, vec!["127.0.0.1:1".to_owned()]);
        let tried = match &source {
            Source::List(list) => list.members.clone(),
            // A file says the rest of each.
            Source::File(_) => Vec::new(),
            _ => vec![example],
        };
        let making = move |member: &Member| node(member, &each, &defaults);
        for member in &tried {
            making(member).map_err(|why| format!("--servers {text}: {}: {why}", member.name))?;
        }
        let directory = Directory::start(source).map_err(|e| format!("--servers {text}: {e}"))?;
        Ok(Some((directory, Arc::new(making))))
    }
}

/// What servers do that a source does not tell the role of.
fn role_of(each: &[String]) -> Result<MemberRole, String> {
    let mut words = each.iter();
    let mut role = MemberRole::Both;
    while let Some(word) = words.next() {
        let value = match word.split_once('=') {
            Some(("--role", value)) => value,
            None if word == "--role" => words.next().ok_or("--each: --role without a role")?,
            _ => continue,
        };
        role = MemberRole::parse(value).map_err(|e| format!("--each: {e}"))?;
    }
    Ok(role)
}

fn source(text: &str, role: MemberRole) -> Result<Source, String> {
    let wrong = |why: &str| format!("--servers {text}: {why}");
    if let Some(rest) = text.strip_prefix("dns:") {
        let (name, port) = rest.rsplit_once(':').ok_or_else(|| wrong("write dns:HOST:PORT"))?;
        let port = port.parse().map_err(|_| wrong("that is no port; write dns:HOST:PORT"))?;
        return Ok(Source::Dns(DnsSource::new(name, port, role)));
    }
    if let Some(rest) = text.strip_prefix("kubernetes:") {
        let (service, port) = rest.split_once(':').map_or((rest, None), |(name, port)| (name, Some(port)));
        let found = KubernetesSource::in_cluster(service, role).map_err(|e| wrong(&e.to_string()))?;
        return Ok(Source::Kubernetes(KubernetesSource { port: port.map(str::to_owned), ..found }));
    }
    if text.contains("://") {
        let members =
            text.split(',').map(str::trim).filter(|one| !one.is_empty()).map(|one| listed(one, role));
        let members = members.collect::<Result<_, _>>().map_err(|why| wrong(&why))?;
        return Ok(Source::List(ListSource { members }));
    }
    let end = Path::new(text).extension().and_then(|end| end.to_str());
    match end {
        // It may come later, and be there then.
        Some("toml" | "json") => Ok(Source::File(FileSource::new(text))),
        _ => Err(wrong(
            "no list of servers; give http://HOST:PORT,..., FILE.toml, dns:HOST:PORT or kubernetes:SERVICE",
        )),
    }
}

/// `http://HOST:PORT`, or `ROLE=http://HOST:PORT`; named after its address.
fn listed(text: &str, role: MemberRole) -> Result<Member, String> {
    let (role, url) = match text.split_once("=http") {
        Some((word, _)) => (MemberRole::parse(word).map_err(|e| e.to_string())?, &text[word.len() + 1..]),
        None => (role, text),
    };
    let url = url.trim_end_matches('/');
    let name = url.split_once("://").map_or(url, |(_, rest)| rest);
    let member = Member::new(name, role, vec![url.to_owned()]);
    member.validate().map(|()| member).map_err(|e| e.to_string())
}

fn node(member: &Member, each: &[String], defaults: &Defaults) -> Result<RemoteNode, String> {
    let role = member.role.instance().ok_or("a conductor is no server")?;
    let address = &member.addresses[0];
    let url = if address.contains("://") { address.clone() } else { format!("http://{address}") };
    // What comes later counts.
    let mut words = vec![
        format!("--name={}", member.name),
        "--conductor=http://within.this.process:0".to_owned(),
        format!("--block-tokens={}", defaults.block_tokens),
        format!("--url={url}"),
    ];
    words.extend(defaults.model.iter().map(|folder| format!("--model={folder}")));
    words.extend_from_slice(each);
    words.push(format!("--role={}", crate::conductor::role_word(role)));
    for (name, value) in &member.labels {
        if OPTIONS.contains(&name.as_str()) {
            words.push(format!("--{name}={value}"));
        } else {
            tracing::debug!(server = member.name, label = name, "this label is no option of a node");
        }
    }
    let read = <Words as clap::Parser>::try_parse_from(&words).map_err(|e| {
        let text = e.to_string();
        text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
    })?;
    let dialect = read.node.engines.dialect();
    let dialect =
        dialect.ok_or("what kind of server is it? give --each '--engine vllm', sglang or openai")?;
    read.node.remote.node(&read.node, dialect, role)
}

/// The nodes of a list in a file, as they would be made.
#[cfg(test)]
pub(super) fn listed_in(path: &Path, each: &str) -> Result<Vec<RemoteNode>, String> {
    let each: Vec<String> = each.split_whitespace().map(str::to_owned).collect();
    let defaults = Defaults { model: None, block_tokens: 16 };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let directory = Directory::start(Source::File(FileSource::new(path))).map_err(|e| e.to_string())?;
        let all = directory.read_once().await;
        all.members.values().map(|one| node(&one.member, &each, &defaults)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_remote::Dialect;
    use baton_types::Role;

    fn defaults() -> Defaults {
        Defaults { model: None, block_tokens: 32 }
    }

    fn members(text: &str) -> Result<Vec<Member>, String> {
        match source(text, MemberRole::Both)? {
            Source::List(list) => Ok(list.members),
            other => Err(format!("{other:?}")),
        }
    }

    fn made(member: &Member, each: &str) -> Result<RemoteNode, String> {
        let each: Vec<String> = each.split_whitespace().map(str::to_owned).collect();
        node(member, &each, &defaults())
    }

    #[test]
    fn servers_are_listed_on_the_command_line_with_their_roles() {
        let list = members("http://10.0.0.7:8000/, prefill=http://a:1,decode=https://[::1]:2").unwrap();
        let told: Vec<(&str, MemberRole)> = list.iter().map(|one| (one.name.as_str(), one.role)).collect();
        let (both, prefill, decode) = (MemberRole::Both, MemberRole::Prefill, MemberRole::Decode);
        assert_eq!(told, [("10.0.0.7:8000", both), ("a:1", prefill), ("[::1]:2", decode)]);
        assert_eq!(list[0].addresses, ["http://10.0.0.7:8000"]);
        for (wrong, said) in [
            ("http://a", "no port"),
            ("king=http://a:1", "there is no role 'king'"),
            ("a:1", "no list of servers"),
            ("dns:a", "dns:HOST:PORT"),
            ("dns:a:b", "no port"),
            ("kubernetes:engines", "this is no pod"),
        ] {
            let error = source(wrong, both).unwrap_err();
            assert!(error.contains(said) && error.contains(wrong), "{error}");
        }
        assert!(matches!(source("dns:engines:8000", both), Ok(Source::Dns(_))));
        assert!(matches!(source("members.toml", both), Ok(Source::File(_))));
    }

    #[test]
    fn a_servers_labels_count_more_than_what_all_have() {
        let mut member = Member::new("v0", MemberRole::Prefill, vec!["10.0.0.7:8000".into()]);
        let plain = made(&member, "--engine vllm --handoff nixl --pass-tokens 2048").unwrap();
        assert_eq!((plain.name.as_str(), plain.role, plain.block_tokens), ("v0", Role::Prefill, 32));
        assert_eq!((plain.engine.dialect, plain.pass_tokens), (Dialect::Vllm, Some(2_048)));
        assert_eq!(plain.engine.url, "http://10.0.0.7:8000");
        member.labels.insert("pass-tokens".into(), "4096".into());
        member.labels.insert("zone".into(), "a".into());
        let labelled = made(&member, "--engine vllm --block-tokens 16 --pass-tokens 2048").unwrap();
        assert_eq!((labelled.pass_tokens, labelled.block_tokens), (Some(4_096), 16));
    }

    #[test]
    fn what_cannot_work_is_said_before_anything_is_served() {
        let member = Member::new("v0", MemberRole::Both, vec!["10.0.0.7:8000".into()]);
        for (each, said) in [
            ("", "what kind of server"),
            ("--engine builtin", "what kind of server"),
            ("--engine vlm", "invalid value 'vlm'"),
            ("--engine vllm --pass-token 3", "unexpected argument '--pass-token'"),
            ("--engine vllm --profile nobodys", "nobodys"),
            ("--engine openai --events tcp://a:1", "only vllm's and sglang's"),
        ] {
            let error = made(&member, each).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
        assert!(role_of(&["--role".into()]).is_err());
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(role_of(&words("--engine vllm --role decode")), Ok(MemberRole::Decode));
        assert_eq!(role_of(&words("--role=prefill")), Ok(MemberRole::Prefill));
        assert!(role_of(&words("--role king")).is_err_and(|e| e.contains("king")));
    }
}

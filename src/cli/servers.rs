//! Servers that `baton serve` drives by itself, from the command line.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, Error, Result, bail};
use baton_membership::{
    Directory, DnsSource, FileSource, KubernetesSource, ListSource, Member, MemberRole, Source,
};
use baton_router::Tokenization;
use baton_types::Role;
use parking_lot::Mutex;

use crate::cli::engines::{Vocabulary, needs_model, tokenization_in, vocabulary_of};
use crate::cli::node::NodeArgs;
use crate::node::RemoteNode;
use crate::up::NodeFactory;

/// Options of `baton node` that a server may have; a member's label of such a name sets it.
const OPTIONS: [&str; 21] = [
    "engine",
    "model",
    "profile",
    "block-tokens",
    "pass-tokens",
    "max-running",
    "prompts",
    "url",
    "handoff",
    "bootstrap-url",
    "bootstrap-host",
    "bootstrap-port",
    "events",
    "events-replay",
    "engine-key",
    "served-model",
    "revision",
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
        default_value = "",
        hide_default_value = true
    )]
    each: String,
}

/// The defaults for servers.
pub struct Defaults {
    /// Folder of the tokenizer.
    model: Option<String>,
    /// Tokens in a block.
    block_tokens: u32,
    /// Folders that were read: one is read once, however many servers have it.
    read: Mutex<BTreeMap<String, Vocabulary>>,
}

impl Defaults {
    /// Blocks of so many tokens, and the folder of the tokenizer with what was read of it.
    ///
    /// # Errors
    /// When the tokenizer cannot be used.
    pub fn new(block_tokens: u32, model: Option<(&Path, &Tokenization)>) -> Result<Self> {
        let folder = model.map(|(folder, _)| folder.display().to_string());
        let mut read = BTreeMap::new();
        if let (Some(folder), Some((_, tokenization))) = (&folder, model) {
            read.insert(folder.clone(), vocabulary_of(tokenization)?);
        }
        Ok(Self { model: folder, block_tokens, read: Mutex::new(read) })
    }

    fn vocabulary(&self, folder: &str) -> Result<Vocabulary> {
        let mut known = self.read.lock();
        if let Some(vocabulary) = known.get(folder) {
            return Ok(vocabulary.clone());
        }
        let vocabulary = vocabulary_of(&tokenization_in(Path::new(folder))?)?;
        known.insert(folder.to_owned(), vocabulary.clone());
        Ok(vocabulary)
    }
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
    pub fn start(&self, defaults: Defaults) -> Result<Option<(Directory, NodeFactory)>> {
        let Some(text) = &self.servers else { return Ok(None) };
        let each: Vec<String> = self.each.split_whitespace().map(str::to_owned).collect();
        let role = role_of(&each)?;
        for_servers(&each)?;
        let source = source(text, role)?;
        let example = Member::new("example", role, vec!["127.0.0.1:1".to_owned()]);
        let tried = match &source {
            Source::List(list) => list.members.clone(),
            // A file says the rest of each: what is said here has to be words at least.
            Source::File(_) => {
                read(&example, &each, &defaults).context("--each")?;
                Vec::new()
            }
            _ => vec![example],
        };
        let making = move |member: &Member| node(member, &each, &defaults);
        for member in &tried {
            making(member).with_context(|| format!("--servers {text}: {}", member.name))?;
        }
        let directory = Directory::start(source).with_context(|| format!("--servers {text}"))?;
        let making = move |member: &Member| making(member).map_err(|e| format!("{e:#}"));
        Ok(Some((directory, Arc::new(making))))
    }
}

/// The role of servers whose source gives none.
fn role_of(each: &[String]) -> Result<MemberRole> {
    let mut words = each.iter();
    let mut role = MemberRole::Both;
    while let Some(word) = words.next() {
        let value = match word.split_once('=') {
            Some(("--role", value)) => value,
            None if word == "--role" => words.next().context("--each: --role without a role")?,
            _ => continue,
        };
        role = MemberRole::parse(value).context("--each")?;
    }
    Ok(role)
}

/// Whether these are options that servers may have: a name that all of them have, say, would make them fight for it.
fn for_servers(each: &[String]) -> Result<()> {
    for word in each.iter().filter(|word| word.starts_with('-')) {
        let name = word.split_once('=').map_or(word.as_str(), |(name, _)| name);
        let known = name.strip_prefix("--").is_some_and(|name| name == "role" || OPTIONS.contains(&name));
        // Where they are is what the list says.
        if !known || name == "--url" {
            let there_are = OPTIONS.iter().filter(|name| **name != "url").copied();
            let there_are = there_are.collect::<Vec<_>>().join(", --");
            bail!("--each: {name} is no option of all servers; there are: --role, --{there_are}");
        }
    }
    Ok(())
}

fn source(text: &str, role: MemberRole) -> Result<Source> {
    let servers = || format!("--servers {text}");
    if let Some(rest) = text.strip_prefix("dns:") {
        let (name, port) = rest.rsplit_once(':').context("write dns:HOST:PORT").with_context(servers)?;
        let port = port.parse().ok();
        let port = port.context("that is no port; write dns:HOST:PORT").with_context(servers)?;
        return Ok(Source::Dns(DnsSource::new(name, port, role)));
    }
    if let Some(rest) = text.strip_prefix("kubernetes:") {
        let (service, port) = rest.split_once(':').map_or((rest, None), |(name, port)| (name, Some(port)));
        let found = KubernetesSource::in_cluster(service, role).with_context(servers)?;
        return Ok(Source::Kubernetes(KubernetesSource { port: port.map(str::to_owned), ..found }));
    }
    if text.contains("://") {
        let members =
            text.split(',').map(str::trim).filter(|one| !one.is_empty()).map(|one| listed(one, role));
        let members = members.collect::<Result<_>>().with_context(servers)?;
        return Ok(Source::List(ListSource { members }));
    }
    let end = Path::new(text).extension().and_then(|end| end.to_str());
    match end {
        // It may come later, and be there then.
        Some("toml" | "json") => Ok(Source::File(FileSource { role, ..FileSource::new(text) })),
        _ => bail!(
            "{}: no list of servers; give http://HOST:PORT,..., FILE.toml, dns:HOST:PORT or kubernetes:SERVICE",
            servers()
        ),
    }
}

/// `http://HOST:PORT`, or `ROLE=http://HOST:PORT`; named after its address.
fn listed(text: &str, role: MemberRole) -> Result<Member> {
    let (role, url) = match text.split_once("=http") {
        Some((word, _)) => (MemberRole::parse(word)?, &text[word.len() + 1..]),
        None => (role, text),
    };
    let url = url.trim_end_matches('/');
    let name = url.split_once("://").map_or(url, |(_, rest)| rest);
    let member = Member::new(name, role, vec![url.to_owned()]);
    member.validate()?;
    Ok(member)
}

/// Combines a member's options, the common ones and the defaults: as `baton node` reads them, and the model's folder.
fn read(member: &Member, each: &[String], defaults: &Defaults) -> Result<(NodeArgs, Role, Option<String>)> {
    let role = member.role.instance().context("a conductor is no server")?;
    let address = &member.addresses[0];
    let url = if address.contains("://") { address.clone() } else { format!("http://{address}") };
    // Later options override earlier ones.
    let mut words = vec![
        format!("--name={}", member.name),
        "--conductor=http://within.this.process:0".to_owned(),
        format!("--block-tokens={}", defaults.block_tokens),
        format!("--url={url}"),
    ];
    let mut model = defaults.model.clone();
    let mut each = each.iter();
    while let Some(word) = each.next() {
        // The folder is read here, once for all that have it.
        match word.strip_prefix("--model") {
            Some("") => model = Some(each.next().context("--model without a folder")?.clone()),
            Some(rest) if rest.starts_with('=') => model = Some(rest[1..].to_owned()),
            _ => words.push(word.clone()),
        }
    }
    words.push(format!("--role={}", role.name()));
    for (name, value) in &member.labels {
        match name.as_str() {
            "model" => model = Some(value.clone()),
            known if OPTIONS.contains(&known) => words.push(format!("--{name}={value}")),
            _ => tracing::debug!(server = member.name, label = name, "this label is no option of a node"),
        }
    }
    // The etcd that this process's environment names is not where its own nodes look for a conductor.
    let command = <Words as clap::CommandFactory>::command().mut_arg("etcd", |arg| arg.env(None::<&str>));
    let words = command.try_get_matches_from(&words);
    let words = words.and_then(|words| <Words as clap::FromArgMatches>::from_arg_matches(&words));
    let words = words.map_err(|e| Error::msg(in_a_line(&e.to_string())))?;
    Ok((words.node, role, model))
}

/// The fault of the options and the right form, without the usage text.
fn in_a_line(error: &str) -> String {
    let lines = error.lines().map(str::trim);
    let lines = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    let lines: Vec<&str> = lines.filter(|line| !line.is_empty()).collect();
    lines.join("; ").trim_start_matches("error: ").to_owned()
}

fn node(member: &Member, each: &[String], defaults: &Defaults) -> Result<RemoteNode> {
    let (args, role, model) = read(member, each, defaults)?;
    let dialect = args.engines.dialect();
    let dialect =
        dialect.context("what kind of server is it? give --each '--engine vllm', sglang or openai")?;
    let folder = model.with_context(|| needs_model(dialect))?;
    let node = args.remote.node(&args, (dialect, role), defaults.vocabulary(&folder)?)?;
    // An address that nobody can call is said now.
    baton_remote::RemoteEngine::new(node.engine.clone())?;
    Ok(node)
}

/// The nodes of a list in a file, as they would be made.
#[cfg(test)]
pub(super) fn listed_in(path: &Path, each: &str) -> Result<Vec<RemoteNode>> {
    let each: Vec<String> = each.split_whitespace().map(str::to_owned).collect();
    let defaults = Defaults::new(16, Some((Path::new("bytes"), &Tokenization::bytes())))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let directory = Directory::start(Source::File(FileSource::new(path)))?;
        let all = directory.read_once().await;
        all.members.values().map(|one| node(&one.member, &each, &defaults)).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_remote::Dialect;

    fn defaults() -> Defaults {
        Defaults::new(32, Some((Path::new("bytes"), &Tokenization::bytes()))).unwrap()
    }

    fn members(text: &str) -> Result<Vec<Member>> {
        match source(text, MemberRole::Both)? {
            Source::List(list) => Ok(list.members),
            other => bail!("{other:?}"),
        }
    }

    fn made(member: &Member, each: &str) -> Result<RemoteNode> {
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
            let error = format!("{:#}", source(wrong, both).unwrap_err());
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
        let all = "--engine vllm --block-tokens 16 --pass-tokens 2048 --max-running 128";
        let labelled = made(&member, all).unwrap();
        assert_eq!((labelled.pass_tokens, labelled.block_tokens), (Some(4_096), 16));
        assert_eq!((plain.max_running, labelled.max_running), (None, Some(128)));
        assert!(made(&member, "--engine vllm --max-running 0").is_err(), "a server that runs nothing");
    }

    #[test]
    fn what_cannot_work_is_said_before_anything_is_served() {
        let member = Member::new("v0", MemberRole::Both, vec!["10.0.0.7:8000".into()]);
        for (each, said) in [
            ("", "what kind of server"),
            ("--engine builtin", "what kind of server"),
            ("--engine vlm", "invalid value 'vlm'"),
            ("--engine vlm", "possible values: builtin"),
            ("--engine vllm --pass-token 3", "unexpected argument '--pass-token'"),
            ("--engine vllm --profile nobodys", "nobodys"),
            ("--engine openai --events tcp://a:1", "only vllm's and sglang's"),
            ("--engine vllm --model no-such-folder", "no-such-folder"),
            ("--engine vllm --model", "--model without a folder"),
        ] {
            let error = format!("{:#}", made(&member, each).unwrap_err());
            assert!(error.contains(said), "{error}");
        }
        let strange = Member::new("v0", MemberRole::Both, vec!["ftp://10.0.0.7:21".into()]);
        assert!(made(&strange, "--engine vllm").is_err_and(|why| format!("{why:#}").contains("http")));
        assert!(role_of(&["--role".into()]).is_err());
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(role_of(&words("--engine vllm --role decode")).unwrap(), MemberRole::Decode);
        assert_eq!(role_of(&words("--role=prefill")).unwrap(), MemberRole::Prefill);
        assert!(role_of(&words("--role king")).is_err_and(|e| format!("{e:#}").contains("king")));
    }

    #[test]
    fn a_server_without_a_tokenizer_is_refused() {
        let nothing = Defaults::new(16, None).unwrap();
        let mut member = Member::new("v0", MemberRole::Both, vec!["10.0.0.7:8000".into()]);
        for engine in ["vllm", "sglang", "openai"] {
            let error =
                format!("{:#}", node(&member, &[format!("--engine={engine}")], &nothing).unwrap_err());
            assert!(error.contains(&format!("--engine {engine} needs --model")), "{error}");
            assert!(node(&member, &[format!("--engine={engine}"), "--model=bytes".into()], &nothing).is_ok());
        }
        member.labels.insert("model".into(), "bytes".into());
        let made = node(&member, &["--engine=vllm".into()], &nothing).unwrap();
        assert_eq!((made.vocab_tokens, made.sample.is_some()), (512, true));
    }

    #[test]
    fn what_would_make_servers_one_is_refused_for_all_of_them() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        for wrong in
            ["--name x", "--url=http://a:1", "--conductor http://a:1", "-c file", "--log info", "--blocks 3"]
        {
            let error = for_servers(&words(wrong)).unwrap_err().to_string();
            assert!(
                error.contains(wrong.split([' ', '=']).next().unwrap()) && error.contains("--engine"),
                "{error}"
            );
        }
        for right in ["--engine vllm --role prefill", "--engine=sglang --bootstrap-port=1"] {
            for_servers(&words(right)).unwrap();
        }
    }

    #[test]
    fn a_models_folder_is_read_once_for_all_that_have_it() {
        let place = tempfile::tempdir().unwrap();
        let (folder, other) = (place.path().join("one"), place.path().join("two"));
        let defaults = defaults();
        let known = |folder: &Path, count| {
            let plain = vocabulary_of(&Tokenization::bytes()).unwrap();
            let vocabulary = Vocabulary { tokens: count, ends: vec![count], ..plain };
            defaults.read.lock().insert(folder.display().to_string(), vocabulary);
        };
        known(&folder, 7);
        known(&other, 9);
        // Nothing is there to read.
        let mut member = Member::new("v0", MemberRole::Both, vec!["10.0.0.7:8000".into()]);
        let each = |folder: &Path| {
            vec!["--engine=vllm".to_owned(), "--model".to_owned(), folder.display().to_string()]
        };
        let vocabulary = |member: &Member| {
            let node = node(member, &each(&folder), &defaults).unwrap();
            (node.vocab_tokens, node.end_tokens)
        };
        assert_eq!(vocabulary(&member), (7, vec![7]));
        member.labels.insert("model".into(), other.display().to_string());
        assert_eq!(vocabulary(&member), (9, vec![9]));
    }
}

//! `baton serve`: front door and conductor; nodes attach from wherever they run.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use baton_membership::election::state::EndReason;
use baton_membership::{Candidacy, Leadership, Member, MemberRole, Policies, Standing};
use baton_router::Tokenization;

use crate::cli::engines::tokenization_in;
use crate::cli::etcd::EtcdArgs;
use crate::cli::guard::GuardArgs;
use crate::cli::servers::{Defaults, ServersArgs};
use crate::conductor::Lead;
use crate::config::Config;
use crate::guard::{seen_from_outside, to_attach};
use crate::up::Service;

/// Where nodes attach when nothing else is said: they have to know it before this starts.
pub(super) const CONTROL: &str = "127.0.0.1:9090";
/// The lease of a conductor that leads: nodes are without one for about as long when it dies.
const LEASE_US: u64 = 10_000_000;

/// Arguments of `baton serve`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton serve -c deploy/baton.toml\n  \
    baton serve --control 10.0.0.5:9090 --model /models/llama\n  \
    baton serve --servers http://10.0.0.7:8000,http://10.0.0.8:8000 --each '--engine vllm' --model /models/llama\n  \
    baton node --name p0 --role prefill --conductor http://10.0.0.5:9090 --kv-listen 10.0.0.6:0")]
pub struct ServeArgs {
    /// Configuration file; its `[scheduler]` section and its keys are followed when it changes
    #[arg(short, long)]
    config: Option<PathBuf>,
    /// Where clients are served [default: the configuration's service.listen]
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<String>,
    /// Where nodes attach [default: the configuration's service.control; 127.0.0.1:9090 if its port is 0]
    #[arg(long, value_name = "ADDRESS:PORT")]
    control: Option<String>,
    /// Hugging Face folder with the tokenizer of the model that the nodes serve; `bytes` is one token a byte [default: bytes]
    #[arg(long, value_name = "FOLDER")]
    model: Option<PathBuf>,
    /// Where nodes reach the control address from elsewhere, as http://ADDRESS:PORT [default: the address itself]
    #[arg(long, requires = "etcd", value_name = "URL")]
    advertise: Option<String>,
    /// Name among the conductors [default: this machine's, and the control port]
    #[arg(long, requires = "etcd")]
    name: Option<String>,
    /// How conductors elect the one that leads, where there are several
    #[command(flatten)]
    etcd: EtcdArgs,
    /// Protection of the control port
    #[command(flatten)]
    guard: GuardArgs,
    /// Threads that serve clients, and as many that decide and listen to nodes; 1 spends the least processor time a
    /// call [default: one a core]
    #[arg(long, value_parser = super::threads)]
    threads: Option<usize>,
    /// Log filter, like info or baton=debug
    #[arg(long, env = "BATON_LOG", default_value = "info")]
    log: String,
    /// Servers that it drives by itself; last, for its heading goes for all that follows
    #[command(flatten)]
    servers: ServersArgs,
}

/// Runs `baton serve` until Ctrl-C or SIGTERM.
///
/// # Errors
/// With one line for the user: what failed, and the remedy.
pub fn run(args: ServeArgs) -> Result<ExitCode> {
    crate::log::start(&args.log)?;
    let config = settings(&args)?;
    let tokenization = match &args.model {
        Some(folder) => tokenization_in(folder)?,
        None => Tokenization::bytes(),
    };
    let runtime = super::runtime(args.threads)?;
    runtime.block_on(serve(config, tokenization, args))?;
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    Ok(ExitCode::SUCCESS)
}

/// The configuration in force: the file's, and what the command line says on top.
fn settings(args: &ServeArgs) -> Result<Config> {
    let mut config = crate::policy::at_start(args.config.as_deref())?;
    args.guard.put(&mut config.service);
    if let Some(listen) = &args.listen {
        config.service.listen.clone_from(listen);
    }
    match &args.control {
        Some(control) => config.service.control.clone_from(control),
        None if config.service.control.ends_with(":0") => CONTROL.clone_into(&mut config.service.control),
        None => {}
    }
    config.validate()?;
    Ok(config)
}

async fn serve(config: Config, tokenization: Tokenization, args: ServeArgs) -> Result<()> {
    let stop = crate::shutdown::on_signal()?;
    let etcd = args.etcd.client()?;
    let lead = if etcd.is_some() { Lead::elected() } else { Lead::alone() };
    let policies = etcd.as_ref().map(|etcd| Policies::new(etcd, &args.etcd.cluster)).transpose();
    let led = (lead.clone(), policies?);
    let read = args.model.as_ref().map(|folder| (folder.as_path(), &tokenization));
    let defaults = Defaults::new(config.scheduler.block_tokens, read)?;
    let servers = args.servers.start(defaults)?;
    let service = Service::start_led(&config, tokenization, args.config.clone(), led, args.threads).await?;
    if let Some(etcd) = etcd {
        let candidacy = Candidacy::new(&args.etcd.cluster, conductor(&service, &args)?, LEASE_US);
        lead.stands(Leadership::start(&etcd, candidacy)?);
    }
    if let Some((directory, making)) = servers {
        service.drive(directory, making, lead.clone());
    }
    greet(&service, &config, &args);
    let greeting = async {
        service.ready().await;
        announce!("ready: a canary passed through a pair of nodes");
        std::future::pending::<()>().await
    };
    tokio::select! {
        () = greeting => {}
        () = stop.cancelled() => {}
        why = deposed(&lead) => {
            // Another may lead before long: nothing more is decided here, not even to the end of a drain.
            service.stop().await;
            bail!(why);
        }
    }
    service.drain().await;
    if let Some(leadership) = lead.standing() {
        leadership.resign().await;
    }
    service.stop().await;
    Ok(())
}

/// This conductor's entry for the other members.
fn conductor(service: &Service, args: &ServeArgs) -> Result<Member> {
    let control = service.control;
    if args.advertise.is_none() && control.ip().is_unspecified() {
        bail!("serve: nodes cannot attach to {control}; say where they can with --advertise");
    }
    let name = args.name.clone().unwrap_or_else(|| crate::up::conductor_name(control));
    let address = args.advertise.clone().unwrap_or_else(|| format!("{}://{control}", service.guard.scheme()));
    Ok(Member::new(name, MemberRole::Conductor, vec![address]))
}

/// Resolves when this conductor loses its leadership, with the remedy. It never resolves without an election.
async fn deposed(lead: &Lead) -> String {
    let Some(leadership) = lead.standing() else { return std::future::pending().await };
    let mut standing = leadership.standing();
    let leading = |standing: &Standing| matches!(standing, Standing::Leading { .. });
    let Ok(led) = standing.wait_for(leading).await.map(|standing| *standing) else {
        return std::future::pending().await;
    };
    // Being elected once more counts too: whatever was decided in between was decided by another.
    let ended = standing.wait_for(|standing| *standing != led).await;
    let why = match ended.map(|standing| *standing) {
        Ok(Standing::Deposed { why: EndReason::TimeUp | EndReason::LeaseGone, .. }) => {
            "its lease could not be renewed"
        }
        _ => "its election was taken back",
    };
    format!("serve: this conductor no longer leads: {why}; see whether etcd is well, and start it again")
}

fn greet(service: &Service, config: &Config, args: &ServeArgs) {
    let scheme = if config.service.tls_cert.is_empty() { "http" } else { "https" };
    let (clients, control) = (service.clients, service.control);
    announce!(
        "baton: front door on {scheme}://{clients}, nodes attach on {control}; Ctrl-C drains and stops"
    );
    let model = args.model.as_ref().map_or_else(String::new, |f| format!(" --model {}", f.display()));
    let block_tokens = config.scheduler.block_tokens;
    let to_attach = to_attach(&config.service, control);
    let alone: &[_] = if args.servers.any() { &[] } else { &[("p0", "prefill"), ("d0", "decode")] };
    for (name, role) in alone {
        announce!(
            "node:  baton node --name {name} --role {role} {to_attach} --block-tokens {block_tokens}{model}"
        );
    }
    if !alone.is_empty() {
        announce!(
            "       and for a server of vLLM or SGLang: --engine vllm --url http://HOST:PORT (docs/engines.md)"
        );
    }
    let key = if config.service.admin_key.expose().is_empty() { "" } else { " --key ADMIN_KEY" };
    let url = format!("{scheme}://{}", seen_from_outside(clients));
    announce!("watch: the page {url}/, or baton top --url {url}{key}   metrics: {url}/metrics");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Node {
        #[command(flatten)]
        engines: crate::cli::engines::Engines,
    }

    #[derive(clap::Parser)]
    struct Serve {
        #[command(flatten)]
        args: ServeArgs,
    }

    fn args(control: Option<&str>) -> ServeArgs {
        let more = control.into_iter().flat_map(|control| ["--control", control]);
        let read = <Serve as clap::Parser>::try_parse_from(["serve"].into_iter().chain(more));
        read.unwrap_or_else(|e| panic!("{e}")).args
    }

    #[test]
    fn nodes_find_a_fixed_port_unless_another_is_given() {
        let told = |control| settings(&args(control)).map(|config| config.service.control);
        assert_eq!(told(None).unwrap(), CONTROL);
        assert_eq!(told(Some("127.0.0.1:0")).unwrap(), "127.0.0.1:0");
        assert!(told(Some("here")).is_err_and(|e| e.to_string().contains("service.control = \"here\"")));
    }

    #[test]
    fn without_a_file_blocks_are_as_long_as_those_of_nodes_that_are_not_told() {
        let config = settings(&args(None)).expect("the defaults are valid");
        let node = <Node as clap::Parser>::try_parse_from(["node"]).expect("nothing is required");
        assert_eq!(config.scheduler.block_tokens, node.engines.block_tokens());
        assert!(config.scheduler.explain_every > 0, "decisions are remembered for /admin/explain");
    }

    #[test]
    fn what_is_shipped_for_systemd_and_containers_starts_this_command() {
        let unit = include_str!("../../deploy/baton.service");
        let start =
            unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/")).expect("a start");
        let image = include_str!("../../deploy/Dockerfile");
        let line = image.lines().find_map(|line| line.strip_prefix("CMD ")).expect("a command");
        let words: Vec<String> = serde_json::from_str(line).expect("the exec form");
        let image = format!("baton {}", words.join(" "));
        for command in [start, &image] {
            let cli = <crate::cli::Cli as clap::Parser>::try_parse_from(command.split(' '));
            let cli = cli.unwrap_or_else(|e| panic!("{command}: {e}"));
            let crate::cli::Command::Serve(args) = cli.command else { panic!("{command}: not serve") };
            assert_eq!(args.config.as_deref(), Some(std::path::Path::new("/etc/baton/baton.toml")));
        }
    }

    #[test]
    fn the_shipped_configuration_is_valid_with_and_without_what_is_commented_out() {
        let text = include_str!("../../deploy/baton.toml");
        let shipped = crate::config::parse(text).expect("valid");
        assert_eq!(shipped.scheduler.block_tokens, crate::config::BLOCK_TOKENS);
        let setting = |line: &str| line.starts_with("[[") || line.contains(" = ");
        let whole: Vec<&str> = text
            .lines()
            .map(|line| line.strip_prefix("# ").filter(|rest| setting(rest)).unwrap_or(line))
            .collect();
        let whole = crate::config::parse(&whole.join("\n")).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((whole.service.api_keys.len(), whole.service.tls_cert.is_empty()), (1, false));
        let drain_us = crate::config::ServiceConfig::default().drain_us;
        let time_limit = include_str!("../../deploy/baton.service").lines();
        let time_limit =
            time_limit.filter_map(|l| l.strip_prefix("TimeoutStopSec=")?.parse::<u64>().ok()).next();
        assert!(
            time_limit.is_some_and(|s| s * 1_000_000 > drain_us),
            "systemd waits for the drain: {time_limit:?} s"
        );
    }
}

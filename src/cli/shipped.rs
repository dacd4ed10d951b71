//! Checks that this program accepts every configuration in `deploy/` and every command line of the pages on engines.

mod manifests;

use std::path::{Path, PathBuf};

use clap::Parser as _;

use super::{Cli, Command};

pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/examples")
}

/// Every file below a folder, sorted.
pub(super) fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
        let path = entry.expect("an entry").path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Commands in a text: whole lines, with what a backslash continues, that start this program.
fn commands(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let lines = joined.lines().map(|line| line.trim().trim_start_matches("ExecStart=/usr/local/bin/"));
    let lines = lines.map(|line| line.strip_prefix("exec ").unwrap_or(line));
    lines.filter(|line| line.starts_with("baton ")).map(str::to_owned).collect()
}

/// A command's words, as a shell would have them: variables and quotes become words, a comment or `&` ends it.
fn words(command: &str) -> Vec<String> {
    let command = command.split(" #").next().unwrap_or_default().trim_end_matches([' ', '&']);
    // Every other part stands between single quotes, and is one word.
    let parts = command.split('\'').enumerate().flat_map(|(at, part)| {
        let quoted = at % 2 == 1;
        let inside = quoted.then_some(part).into_iter();
        inside.chain(part.split_whitespace().filter(move |_| !quoted))
    });
    let words = parts.filter(|word| *word != "...");
    words
        .filter(|word| !word.starts_with('$') && !word.starts_with("${") && !word.ends_with('}'))
        .map(|word| {
            word.replace("\"http://$here", "http://10.0.0.7").replace("\"http://$front", "http://10.0.0.5")
        })
        .map(|word| word.trim_matches('"').replace("%i", "3"))
        .collect()
}

fn without_model(words: &[String]) -> Vec<String> {
    let before = |at: usize| at.checked_sub(1).and_then(|at| words.get(at)).map(String::as_str);
    let kept = words.iter().enumerate().filter(|(at, word)| {
        *word != "--model" && !word.starts_with("--model=") && before(*at) != Some("--model")
    });
    kept.map(|(_, word)| word.clone()).collect()
}

#[track_caller]
pub(super) fn parsed(words: &[String]) -> Command {
    // The models of examples are not there when tests run.
    let words: Vec<String> = if words[1] == "node" { without_model(words) } else { words.to_vec() };
    Cli::try_parse_from(&words).unwrap_or_else(|e| panic!("{words:?}: {e}")).command
}

/// Checks a node's command, and returns its block size. `None` where the command is not a node's.
#[track_caller]
pub(super) fn node_blocks(command: &Command) -> Option<u32> {
    let Command::Node(args) = command else { return None };
    let dialect = args.engines.dialect().expect("the examples' nodes drive servers");
    let role = match &args.name {
        name if name.starts_with('p') => baton_types::Role::Prefill,
        name if name.starts_with('d') => baton_types::Role::Decode,
        _ => baton_types::Role::Both,
    };
    let plain =
        crate::cli::engines::vocabulary_of(&baton_router::Tokenization::bytes()).expect("its own sample");
    args.remote.node(args, (dialect, role), plain).unwrap_or_else(|e| panic!("{}: {e}", args.name));
    Some(args.engines.block_tokens())
}

#[test]
fn every_configuration_is_valid_and_fits_the_nodes_beside_it() {
    let mut seen = 0;
    for path in files(&root()).iter().filter(|path| path.ends_with("baton.toml")) {
        let config = crate::config::load(path).unwrap_or_else(|e| panic!("{e}"));
        super::cluster::setup(&config, 1).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let folder = path.parent().expect("a folder");
        for file in files(folder).iter().filter(|file| !file.ends_with("baton.toml")) {
            for command in commands(&read(file)) {
                let command = parsed(&words(&command));
                if let Some(block_tokens) = node_blocks(&command) {
                    assert_eq!(block_tokens, config.scheduler.block_tokens, "{}", file.display());
                    assert!(!config.scheduler.fetch, "{}: engines do not fetch", path.display());
                }
            }
        }
        seen += 1;
    }
    assert_eq!(seen, 6, "the examples were not found");
}

#[test]
fn every_listed_server_can_be_driven() {
    let list = root().join("servers/servers.toml");
    let started = commands(&read(&root().join("servers/run.sh")));
    let words = words(&started[0]);
    assert!(matches!(parsed(&words), Command::Serve(_)), "{words:?}");
    let each = words.iter().skip_while(|word| *word != "--each").nth(1).expect("what all have");
    let made = super::servers::listed_in(&list, each).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(made.len(), 2);
    assert!(made.iter().all(|node| node.events.is_some() && node.pass_tokens == Some(8_192)));
}

#[test]
fn every_example_starts_this_program() {
    let all = files(&root());
    let of = |folder: &str| {
        let inside = all.iter().filter(|path| path.starts_with(root().join(folder)));
        inside.flat_map(|path| commands(&read(path))).map(|line| words(&line)[1].clone()).collect::<Vec<_>>()
    };
    let count = |folder: &str, name: &str| of(folder).iter().filter(|word| *word == name).count();
    assert_eq!(count("laptop", "up"), 1);
    assert_eq!(count("servers", "serve"), 1);
    assert_eq!((count("one-gpu", "serve"), count("one-gpu", "node")), (1, 1));
    assert_eq!((count("vllm-nixl-4p4d", "serve"), count("vllm-nixl-4p4d", "node")), (1, 2));
    assert_eq!(count("vllm-nixl-4p4d", "check"), 1);
    assert_eq!((count("sglang-pair", "serve"), count("sglang-pair", "node")), (1, 2));
}

#[test]
fn every_command_of_the_pages_on_engines_is_taken() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let pages = ["engines.md", "vllm.md", "sglang.md"].map(|name| read(&docs.join(name)));
    let all = pages.iter().flat_map(|page| commands(page)).filter(|line| !line.contains(" ... "));
    let all: Vec<String> = all.collect();
    let nodes = all.iter().filter(|line| {
        let command = parsed(&words(line));
        node_blocks(&command).is_some()
    });
    assert!(nodes.count() >= 9, "{all:#?}");
}

#[test]
fn units_name_files_and_units_that_are_there() {
    let all = files(&root());
    let names: Vec<String> =
        all.iter().filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned())).collect();
    let mut units = 0;
    for path in all.iter().filter(|path| path.extension().is_some_and(|e| e == "service")) {
        let text = read(path);
        for section in ["[Unit]", "[Service]", "[Install]", "ExecStart=/", "Restart=on-failure"] {
            assert!(text.contains(section), "{} has no {section}", path.display());
        }
        let after =
            text.lines().filter_map(|line| line.strip_prefix("After=")).flat_map(str::split_whitespace);
        for unit in after.filter(|unit| unit.ends_with(".service")) {
            let file = unit.replace("@%i", "@");
            assert!(names.contains(&file), "{}: After={unit} is no unit of ours", path.display());
        }
        units += 1;
    }
    assert_eq!(units, 8, "units were not found");
}

#[test]
fn the_reader_of_command_lines_sees_through_shells() {
    let text = "baton a \\\n  --b \"http://$here:1\" &\nExecStart=/usr/local/bin/baton n%i\nexec baton c ${M:+--m \"$M\"}\nno baton\n";
    let read: Vec<Vec<String>> = commands(text).iter().map(|line| words(line)).collect();
    assert_eq!(
        read,
        [vec!["baton", "a", "--b", "http://10.0.0.7:1"], vec!["baton", "n3"], vec!["baton", "c"]]
    );
}

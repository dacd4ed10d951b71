//! `baton completions` and `baton man`: what shells and manuals know of the command line, out of its own description.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::CommandFactory as _;
use clap_complete::Shell;

use super::{Cli, out};

/// Arguments of `baton completions`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton completions bash > /etc/bash_completion.d/baton\n  \
    baton completions zsh > \"${fpath[1]}/_baton\"\n  \
    baton completions fish > ~/.config/fish/completions/baton.fish")]
pub struct CompletionsArgs {
    /// Which shell
    shell: Shell,
}

/// Arguments of `baton man`.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    baton man | man -l -\n  \
    baton man --out /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Write a page for each command into this folder, which is made if need be [default: print the page of baton itself]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Prints the completions of a shell.
///
/// # Errors
/// When nobody can be printed to.
pub fn completions(args: &CompletionsArgs) -> Result<ExitCode> {
    out::print(&script(args.shell)?)?;
    Ok(ExitCode::SUCCESS)
}

/// Prints the manual, or writes its pages.
///
/// # Errors
/// Names the folder that cannot be written.
pub fn man(args: &ManArgs) -> Result<ExitCode> {
    match &args.out {
        None => out::print(&page()?)?,
        Some(folder) => write(folder)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn script(shell: Shell) -> Result<String> {
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "baton", &mut bytes);
    String::from_utf8(bytes).map_err(|e| anyhow!("completions: {e}; report it"))
}

fn page() -> Result<String> {
    let mut bytes = Vec::new();
    let rendered = clap_mangen::Man::new(Cli::command()).render(&mut bytes);
    rendered.map_err(|e| anyhow!("manual: {e}; report it"))?;
    String::from_utf8(bytes).map_err(|e| anyhow!("manual: {e}; report it"))
}

fn write(folder: &Path) -> Result<()> {
    let written =
        std::fs::create_dir_all(folder).and_then(|()| clap_mangen::generate_to(Cli::command(), folder));
    written.map_err(|e| anyhow!("manual {}: {e}; give a folder that can be written", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum as _;

    fn commands() -> Vec<String> {
        Cli::command().get_subcommands().map(|command| command.get_name().to_owned()).collect()
    }

    #[test]
    fn every_shell_completes_every_command() {
        assert!(commands().len() >= 15, "{:?}", commands());
        for shell in Shell::value_variants() {
            let script = script(*shell).expect("it renders");
            for name in commands() {
                assert!(script.contains(&name), "{shell} knows no {name}");
            }
            assert!(script.contains("block-tokens"), "{shell} knows no options");
        }
    }

    #[test]
    fn every_command_has_a_page_and_the_first_one_names_them_all() {
        let first = page().expect("it renders");
        let place = tempfile::tempdir().expect("a temporary folder");
        let folder = place.path().join("man/man1");
        write(&folder).expect("it can be written");
        for name in commands() {
            let roff = name.replace('-', "\\-");
            assert!(first.contains(&format!("baton\\-{roff}(1)")), "the page has no {name}: {first}");
            let own = std::fs::read_to_string(folder.join(format!("baton-{name}.1"))).expect("its own page");
            assert!(own.contains(".SH SYNOPSIS"), "{own}");
        }
        let error = write(&folder.join("baton.1")).expect_err("that is a file").to_string();
        assert!(error.contains("baton.1") && error.contains("folder"), "{error}");
    }
}

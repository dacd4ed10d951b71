//! How long a function, a file and a parameter list may be, and how big a tracked file.

use crate::finding::Finding;
use crate::outline::Outline;

/// Lines of a function, first line of the signature to the closing brace.
const FUNCTION_LINES_MAX: usize = 70;
/// Lines of a file without its test code.
const FILE_LINES_MAX: usize = 500;
/// Parameters of a function, `self` included, as clippy counts.
const PARAMETERS_MAX: usize = 5;
/// Size of a file under version control.
const TRACKED_BYTES_MAX: u64 = 512 * 1024;

/// Functions and file length of one production source.
pub fn check_sizes(path: &str, source: &str) -> Vec<Finding> {
    let outline = Outline::of(source);
    let mut found = Vec::new();
    for function in outline.functions().into_iter().filter(|f| !f.test) {
        let lines = function.last_line + 1 - function.line;
        if lines > FUNCTION_LINES_MAX {
            let rule = format!("fn {} has {lines} lines, at most {FUNCTION_LINES_MAX}", function.name);
            found.push(Finding::new(path, function.line, rule, "name one of its parts and move it out"));
        }
        if function.parameters > PARAMETERS_MAX && !function.of_a_trait {
            let rule = format!(
                "fn {} has {} parameters, at most {PARAMETERS_MAX}",
                function.name, function.parameters
            );
            found.push(Finding::new(
                path,
                function.line,
                rule,
                "group those that belong together in a struct",
            ));
        }
    }
    let lines = outline.lines - outline.test_lines();
    if lines > FILE_LINES_MAX {
        let rule = format!("{lines} production lines, at most {FILE_LINES_MAX}");
        found.push(Finding::new(path, 0, rule, "split it by purpose, one per file"));
    }
    found
}

/// Sizes of the tracked files.
pub fn check_bytes(files: &[(String, u64)]) -> Vec<Finding> {
    let big = files.iter().filter(|(_, bytes)| *bytes > TRACKED_BYTES_MAX);
    big.map(|(path, bytes)| {
        let rule = format!("{bytes} bytes under version control, at most {TRACKED_BYTES_MAX}");
        Finding::new(path, 0, rule, "generate it, fetch it, or keep it outside the repository")
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{assert_caught, assert_clean};
    use crate::{house, reach};

    #[test]
    fn the_house_keeps_functions_and_files_small() {
        let sources = reach::production_sources();
        assert_clean(sources.iter().flat_map(|(path, text)| check_sizes(path, text)).collect());
    }

    #[test]
    fn nothing_big_is_tracked() {
        let size = |path: &String| std::fs::metadata(house::root().join(path)).map_or(0, |data| data.len());
        let files: Vec<_> = house::files().iter().map(|path| (path.clone(), size(path))).collect();
        assert_clean(check_bytes(&files));
    }

    fn function_of(lines: usize) -> String {
        format!("\nfn long() {{\n{}}}\n", "    step();\n".repeat(lines - 2))
    }

    #[test]
    fn planted_long_function_is_caught() {
        assert_eq!(check_sizes("a.rs", &function_of(70)), []);
        assert_caught(&check_sizes("a.rs", &function_of(71)), 2, "71 lines");
        assert_eq!(check_sizes("a.rs", &format!("#[cfg(test)]\nmod tests {{{}}}", function_of(90))), []);
    }

    #[test]
    fn planted_long_file_is_caught_and_tests_do_not_count() {
        let production = "const A: u8 = 1;\n".repeat(500);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "// more\n".repeat(300));
        assert_eq!(check_sizes("a.rs", &format!("{production}{tests}")), []);
        assert_caught(&check_sizes("a.rs", &format!("{production}\n{tests}")), 0, "501 production lines");
    }

    #[test]
    fn planted_parameter_list_is_caught() {
        let six = "fn f(&self, a: A<B, C>, b: B, c: C, d: D, e: E) {}";
        assert_caught(&check_sizes("a.rs", &format!("impl X {{ {six} }}")), 1, "6 parameters");
        assert_eq!(check_sizes("a.rs", &format!("impl Foreign for X {{ {six} }}")), []);
        assert_eq!(check_sizes("a.rs", "fn f(a: A<B, C>, b: B, c: C, d: D, e: E) {}"), []);
    }

    #[test]
    fn planted_blob_is_caught() {
        let files = [("a.bin".to_owned(), 524_289), ("b.bin".to_owned(), 524_288)];
        let found = check_bytes(&files);
        assert_eq!(found.len(), 1);
        assert_caught(&found, 0, "a.bin");
    }
}

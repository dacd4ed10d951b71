//! The cost profiles that Baton ships, by name, and those of the user, by path.

use baton_types::{CostProfile, ProfileError};
use std::path::Path;

const SHIPPED: [(&str, &str); 7] = [
    ("llama3-70b-8xa100", include_str!("../profiles/llama3-70b-8xa100.toml")),
    ("llama3-70b-8xa100-newtokens", include_str!("../profiles/llama3-70b-8xa100-newtokens.toml")),
    ("llama3-70b-8xh100", include_str!("../profiles/llama3-70b-8xh100.toml")),
    ("llama3-70b-8xh200", include_str!("../profiles/llama3-70b-8xh200.toml")),
    ("llama3-70b-sglang-8xa100", include_str!("../profiles/llama3-70b-sglang-8xa100.toml")),
    ("llama3-70b-sglang-8xh100", include_str!("../profiles/llama3-70b-sglang-8xh100.toml")),
    ("llama3-70b-sglang-8xh200", include_str!("../profiles/llama3-70b-sglang-8xh200.toml")),
];

/// Names of the shipped profiles, sorted.
pub fn names() -> impl Iterator<Item = &'static str> {
    SHIPPED.iter().map(|(name, _)| *name)
}

/// The shipped profile `name`.
///
/// # Errors
/// Lists the known names, and the one that was probably meant.
pub fn named(name: &str) -> Result<CostProfile, ProfileError> {
    match SHIPPED.iter().find(|(known, _)| *known == name) {
        Some((_, text)) => parse(text),
        None => Err(unknown(name)),
    }
}

/// The profile that a user means: a shipped name, or the path of a file (anything that ends in
/// `.toml` or has a directory in it).
///
/// # Errors
/// As [`named`] or [`load`].
pub fn find(name_or_path: &str) -> Result<CostProfile, ProfileError> {
    let path = Path::new(name_or_path);
    if path.extension().is_some_and(|e| e == "toml") || path.components().count() > 1 {
        return load(path);
    }
    named(name_or_path)
}

/// Reads and validates the profile in the file `path`.
///
/// # Errors
/// Names the file, and what is wrong with it.
pub fn load(path: &Path) -> Result<CostProfile, ProfileError> {
    let failed = |what: String| ProfileError(format!("{}: {what}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| failed(e.to_string()))?;
    parse(&text).map_err(|e| failed(e.0))
}

/// Parses and validates a profile.
///
/// # Errors
/// Names the line or the rule that is broken.
pub fn parse(text: &str) -> Result<CostProfile, ProfileError> {
    let profile: CostProfile = toml::from_str(text).map_err(|e| ProfileError(e.to_string()))?;
    profile.validate()?;
    Ok(profile)
}

/// The text of a profile file: [`parse`] gives back `profile`, bit for bit.
///
/// # Errors
/// When a number of the profile is too large for TOML.
pub fn to_toml(profile: &CostProfile) -> Result<String, ProfileError> {
    toml::to_string(profile).map_err(|e| ProfileError(e.to_string()))
}

fn unknown(name: &str) -> ProfileError {
    let known: Vec<&str> = names().collect();
    let meant =
        baton_types::nearest(name, names()).map(|k| format!(" Did you mean {k}?")).unwrap_or_default();
    ProfileError(format!(
        "no profile is called {name:?}.{meant} Known: {}. A file is named by its path, ending in .toml",
        known.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shipped_profile_is_valid_and_goes_by_its_file_name() {
        assert!(names().is_sorted());
        for name in names() {
            let profile = named(name).unwrap();
            assert_eq!(profile.name, name);
            assert_eq!(profile.layers, 80);
            // Llama-3-70B: keys and values, 80 layers, 8 KV heads of 128, two bytes each.
            assert_eq!(profile.kv_bytes_per_token, 2 * 80 * 8 * 128 * 2);
            assert!(profile.fit.prefill_points >= 24 && profile.fit.decode_points >= 64);
            let engine = if name.contains("sglang") { "SGLang" } else { "vLLM" };
            assert!(profile.source.contains(engine) && profile.source.contains("aiconfigurator"));
            let smaller = profile.prefill.knots_us[0].min(profile.decode.base_us[0]);
            assert_eq!(profile.shared_us, smaller);
        }
    }

    #[test]
    fn a_written_profile_reads_back_bit_for_bit() {
        for name in names() {
            let profile = named(name).unwrap();
            assert_eq!(parse(&to_toml(&profile).unwrap()), Ok(profile));
        }
    }

    #[test]
    fn an_unknown_name_gets_the_list_and_the_nearest() {
        let error = named("llama3-70b-8xh10").unwrap_err().0;
        assert!(error.contains("Did you mean llama3-70b-8xh100?"), "{error}");
        assert!(error.contains("llama3-70b-8xh200"), "{error}");
        let error = named("mixtral").unwrap_err().0;
        assert!(!error.contains("Did you mean") && error.contains("Known: "), "{error}");
    }

    #[test]
    fn a_path_is_loaded_and_its_errors_name_the_file() {
        let path = std::env::temp_dir().join(format!("baton-profile-{}.toml", std::process::id()));
        let mut profile = named("llama3-70b-8xh100").unwrap();
        profile.name = String::from("mine");
        std::fs::write(&path, to_toml(&profile).unwrap()).unwrap();
        let found = find(path.to_str().unwrap());
        std::fs::write(&path, to_toml(&profile).unwrap().replace("layers = 80", "layers = 0")).unwrap();
        let invalid = find(path.to_str().unwrap()).unwrap_err().0;
        std::fs::remove_file(&path).unwrap();
        assert_eq!(found.unwrap().name, "mine");
        assert!(invalid.contains("baton-profile-") && invalid.contains("layers"), "{invalid}");
        assert!(find("nowhere.toml").unwrap_err().0.contains("nowhere.toml"));
        assert_eq!(find("llama3-70b-8xa100").unwrap().name, "llama3-70b-8xa100");
    }

    #[test]
    fn an_unknown_key_is_refused() {
        let text = to_toml(&named("llama3-70b-8xa100").unwrap()).unwrap();
        let error = parse(&text.replace("layers =", "layer_count =")).unwrap_err().0;
        assert!(error.contains("layer_count"), "{error}");
    }
}

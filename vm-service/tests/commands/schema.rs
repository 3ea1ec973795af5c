//! The checked-in JSON schema is that of the code.

use std::path::Path;

use vm_service::api::Document;

#[test]
fn is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/vm-service.schema.json");
    let schema = serde_json::to_string_pretty(&schemars::schema_for!(Document)).expect("a schema") + "\n";
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, &schema).expect("written");
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        checked_in,
        schema,
        "{} is out of date: run `UPDATE_SCHEMA=1 cargo test -p vm-service --test commands schema`",
        path.display()
    );
}

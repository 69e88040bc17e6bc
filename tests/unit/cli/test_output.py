"""Output of the command: numbers and text for people, on terminals and elsewhere."""

from zephon.cli.output import count, plural, print_table, printable


def test_numbers_are_worded_for_people():
    assert [count(n) for n in (0, 950, 12_345, 4_560_000, 7.89e9)] == ["0", "950", "12.3k", "4.56M", "7.89G"]
    assert (plural(1, "rank"), plural(2000, "rank")) == ("1 rank", "2,000 ranks")


def test_printable_text_keeps_letters_of_all_scripts_and_nothing_that_steers():
    assert printable("größer 漢字 \x1b]0;x\x07\u202e\n") == "größer 漢字 \\x1b]0;x\\x07\\u202e\\n"
    assert printable("a\n\tb\r", lines=True) == "a\n\tb\\r"


def test_a_wide_table_is_not_cut_where_nobody_has_a_terminal(capsys):
    print_table(["step", "SHA-256"], [["1", "f" * 64], ["10", "[red]"]], right="r")
    assert capsys.readouterr().out == f"step  SHA-256\n   1  {'f' * 64}\n  10  [red]\n"

failed=0
check() {
    if [ "$(bash add.sh "$2" "$3")" = "$4" ]; then echo "PASSED tests/test_calc.sh::$1"; else
    echo "FAILED tests/test_calc.sh::$1 - wrong"; failed=1; fi
}
. tests/test_calc.sh
exit $failed

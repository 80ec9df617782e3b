#!/bin/bash
set -uxo pipefail
git status
git diff HEAD
[ -e setup.sh ] && bash setup.sh
git checkout HEAD tests/test_calc.sh
git apply -v - <<'EOF_1'
diff --git a/tests/test_calc.sh b/tests/test_calc.sh
--- a/tests/test_calc.sh
+++ b/tests/test_calc.sh
@@ -1,1 +1,2 @@
 check test_old 1 1 1
+check test_new 2 3 5
EOF_1
: '>>>>> Start Test Output'
bash tests/run.sh
: '>>>>> End Test Output'
git checkout HEAD tests/test_calc.sh

#include "server/http_router.h"

#include "gtest/gtest.h"
#include "server/http_status.h"

namespace loupe {
namespace {

HttpRouter SomeRoutes() {
  HttpRouter router;
  const HttpHandler handler = Immediate([](const HttpRequest&) { return HttpResponse(); });
  router.Add("GET", "/v1/models", handler);
  router.Add("GET", "/v1/models/{id}", handler);
  router.Add("POST", "/v1/requests/{id}/cancel", handler);
  router.Add("POST", "/both", handler);
  router.Add("GET", "/both", handler);
  return router;
}

TEST(HttpRouter, FindsByMethodAndPath) {
  const HttpRouter router = SomeRoutes();
  EXPECT_NE(router.Find("GET", "/v1/models").handler, nullptr);
  EXPECT_NE(router.Find("HEAD", "/v1/models").handler, nullptr);
  EXPECT_EQ(router.Find("GET", "/v1/models/org/name%20x").parameter, "org/name x");
  EXPECT_EQ(router.Find("POST", "/v1/requests/a-1/cancel").parameter, "a-1");
}

TEST(HttpRouter, TellsUnknownPathsFromWrongMethods) {
  const HttpRouter router = SomeRoutes();
  for (const char* path :
       {"/", "", "/v1", "/v1/models/", "/v1/requests//cancel", "/v1/requests/cancel", "/v1/requests/a", "/V1/models"}) {
    const auto match = router.Find("GET", path);
    EXPECT_EQ(match.handler, nullptr) << path;
    EXPECT_EQ(match.allowed, "") << path;
  }
  EXPECT_EQ(router.Find("POST", "/v1/models").handler, nullptr);
  EXPECT_EQ(router.Find("POST", "/v1/models").allowed, "GET, HEAD");
  EXPECT_EQ(router.Find("PUT", "/both").allowed, "POST, GET, HEAD");
}

TEST(HttpRouter, NamesWhatIsOffered) {
  EXPECT_EQ(SomeRoutes().Offered(),
            "GET /v1/models, GET /v1/models/{id}, POST /v1/requests/{id}/cancel, POST /both, GET /both");
}

TEST(HttpRouter, DecodesPercentsThatAreComplete) {
  EXPECT_EQ(PercentDecode("a%2Fb%2f"), "a/b/");
  EXPECT_EQ(PercentDecode("%"), "%");
  EXPECT_EQ(PercentDecode("%4"), "%4");
  EXPECT_EQ(PercentDecode("%zz%41"), "%zzA");
}

nlohmann::ordered_json ErrorOf(const absl::Status& status) {
  return nlohmann::ordered_json::parse(ErrorResponse(status).body)["error"];
}

TEST(HttpStatus, MapsEveryCode) {
  EXPECT_EQ(HttpStatusOf(absl::OkStatus()), 200);
  EXPECT_EQ(HttpStatusOf(absl::InvalidArgumentError("")), 400);
  EXPECT_EQ(HttpStatusOf(absl::UnauthenticatedError("")), 401);
  EXPECT_EQ(HttpStatusOf(absl::NotFoundError("")), 404);
  EXPECT_EQ(HttpStatusOf(absl::DeadlineExceededError("")), 408);
  EXPECT_EQ(HttpStatusOf(absl::ResourceExhaustedError("")), 429);
  EXPECT_EQ(HttpStatusOf(absl::CancelledError("")), 499);
  EXPECT_EQ(HttpStatusOf(absl::InternalError("")), 500);
  EXPECT_EQ(HttpStatusOf(absl::UnavailableError("")), 503);
}

TEST(HttpStatus, FillsParamAndCode) {
  auto error = ErrorOf(absl::InvalidArgumentError("messages[0].role: is missing"));
  EXPECT_EQ(error["param"], "messages[0].role");
  EXPECT_EQ(error["type"], "invalid_request_error");
  EXPECT_EQ(error["code"], nullptr);
  error = ErrorOf(absl::InvalidArgumentError("the body is not valid JSON: oops"));
  EXPECT_EQ(error["param"], nullptr);
  error = ErrorOf(absl::InvalidArgumentError("context_length_exceeded: 9001 tokens, 8192 fit"));
  EXPECT_EQ(error["code"], "context_length_exceeded");
  EXPECT_EQ(error["message"], "9001 tokens, 8192 fit");
  error = ErrorOf(absl::NotFoundError("model: \"gpt-9\" is not served here"));
  EXPECT_EQ(error["code"], "model_not_found");
  EXPECT_EQ(error["param"], "model");
}

TEST(HttpStatus, SaysWhenToTryAgain) {
  for (const absl::Status& status : {absl::ResourceExhaustedError("queue full"), absl::UnavailableError("loading")}) {
    const HttpResponse response = ErrorResponse(status);
    ASSERT_EQ(response.headers.size(), 1u);
    EXPECT_EQ(response.headers[0].first, "Retry-After");
    EXPECT_GE(std::stoi(response.headers[0].second), 1);
  }
  EXPECT_TRUE(ErrorResponse(absl::InvalidArgumentError("x")).headers.empty());
}

TEST(HttpStatus, ErrorsCarryAnyBytes) {
  EXPECT_NE(ErrorResponse(400, "\xff\x01").body.find("\xef\xbf\xbd"), std::string::npos);
}

}  // namespace
}  // namespace loupe
